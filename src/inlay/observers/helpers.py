"""Flatten observed values, and fuse layers whose weights are quantized together."""

from collections.abc import Mapping

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy
from compressed_tensors.quantization.utils import maybe_pad_tensor_for_block_quant
from torch.nn import Module

from inlay.errors import ConfigurationError, ObservationError
from inlay.ranges.rounding import as_rounded

__all__ = [
    "FUSED_LAYER_NAMES",
    "as_stored",
    "flatten_for_calibration",
    "fuse_weight_observers",
    "fusion_problem",
    "has_global_scale",
    "lerp",
]

# vLLM merges these layers into one, which holds one global scale.
FUSED_LAYER_NAMES: list[tuple[str, ...]] = [
    ("gate_proj", "up_proj"),
    ("q_proj", "k_proj", "v_proj"),
    ("q_a_proj", "kv_a_proj_with_mqa"),  # DeepSeek multi-latent attention
    ("w1", "w3"),  # gate and up of Mixtral and similar models
]

_OBSERVABLE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
_GROUPED = (QuantizationStrategy.GROUP, QuantizationStrategy.TENSOR_GROUP)


def flatten_for_calibration(
    value: torch.Tensor, base_name: str, args: QuantizationArgs
) -> torch.Tensor:
    """Reshape a value to (num_observations, *qparam_shape, group_size).

    The first dimension counts observations (batch times tokens; 1 for a weight), the middle ones
    are those of the scale, and the last holds the elements that share a scale. Blocks at the edge
    are padded with zeros, which every range includes anyway.

    :param value: a weight (rows, columns), an activation (..., features) or an attention state
        (batch, heads, tokens, head size)
    :param base_name: `weight`, `input`, `output`, `q`, `k` or `v`
    :param args: how the value is quantized
    """
    if value.dtype in _INTEGERS:
        value = value.to(torch.float32)
    if value.dtype not in _OBSERVABLE:
        raise ObservationError(
            f"{base_name}: cannot observe a tensor of dtype {value.dtype}; observers take "
            f"{', '.join(str(dtype).removeprefix('torch.') for dtype in _OBSERVABLE)}, and "
            "convert integers to float32"
        )
    if base_name == "weight":
        return _flatten_weight(value, args)
    if base_name in ("input", "output"):
        return _flatten_activation(value, base_name, args)
    if base_name in ("q", "k", "v"):
        return _flatten_attention_state(value, base_name, args)
    raise ObservationError(
        f"unknown base name {base_name!r}; use one of weight, input, output, q, k, v"
    )


def _flatten_weight(value: torch.Tensor, args: QuantizationArgs) -> torch.Tensor:
    if args.strategy == QuantizationStrategy.TENSOR:
        _require_rank(value, "weight", args, at_least=1)
        return value.reshape(1, 1, -1)
    if args.strategy == QuantizationStrategy.CHANNEL:
        _require_rank(value, "weight", args, at_least=2)
        return value.unsqueeze(-2).unsqueeze(0)
    if args.strategy in _GROUPED:
        _require_rank(value, "weight", args, at_least=2)
        return _split_groups(value, "weight", args).unsqueeze(0)
    if args.strategy == QuantizationStrategy.BLOCK:
        _require_rank(value, "weight", args, at_least=2, at_most=2)
        return _split_blocks(value, args).unsqueeze(0)
    raise _not_applicable("weight", args)


def _flatten_activation(
    value: torch.Tensor, base_name: str, args: QuantizationArgs
) -> torch.Tensor:
    if args.strategy == QuantizationStrategy.TENSOR:
        _require_rank(value, base_name, args, at_least=1)
        return value.reshape(-1, 1, value.size(-1))
    if args.strategy == QuantizationStrategy.TOKEN:
        _require_rank(value, base_name, args, at_least=2)
        return value
    if args.strategy in _GROUPED:
        _require_rank(value, base_name, args, at_least=1)
        return _split_groups(value.reshape(-1, value.size(-1)), base_name, args)
    raise _not_applicable(base_name, args)


def _flatten_attention_state(
    value: torch.Tensor, base_name: str, args: QuantizationArgs
) -> torch.Tensor:
    _require_rank(value, base_name, args, at_least=4, at_most=4)
    per_token = value.transpose(1, 2).flatten(0, 1)  # (batch * tokens, heads, head size)
    if args.strategy == QuantizationStrategy.TENSOR:
        return per_token.flatten(-2, -1).unsqueeze(-2)
    if args.strategy == QuantizationStrategy.ATTN_HEAD:
        return per_token.unsqueeze(-2).unsqueeze(-2)
    raise _not_applicable(base_name, args)


def _split_groups(value: torch.Tensor, base_name: str, args: QuantizationArgs) -> torch.Tensor:
    columns = value.size(-1)
    if columns % args.group_size:
        raise ObservationError(
            f"{base_name}: {columns} columns cannot be divided into groups of {args.group_size}"
        )
    return value.reshape(*value.shape[:-1], -1, args.group_size)


def _split_blocks(value: torch.Tensor, args: QuantizationArgs) -> torch.Tensor:
    height, width = args.block_structure
    padded: torch.Tensor = maybe_pad_tensor_for_block_quant(value, args.block_structure)
    rows, columns = padded.shape
    blocks = padded.reshape(rows // height, height, columns // width, width)
    return blocks.transpose(1, 2).flatten(-2, -1)


def _require_rank(
    value: torch.Tensor,
    base_name: str,
    args: QuantizationArgs,
    *,
    at_least: int,
    at_most: int | None = None,
) -> None:
    if value.ndim >= at_least and (at_most is None or value.ndim <= at_most):
        return
    wanted = str(at_least) if at_most == at_least else f"{at_least} or more"
    raise ObservationError(
        f"{base_name}: strategy {_name(args)} needs a tensor of {wanted} dimensions, "
        f"got shape {tuple(value.shape)}"
    )


def _not_applicable(base_name: str, args: QuantizationArgs) -> ObservationError:
    strategies = {
        "weight": "tensor, channel, group, tensor_group, block",
        "input": "tensor, token, group, tensor_group",
        "output": "tensor, token, group, tensor_group",
    }.get(base_name, "tensor, attn_head")
    return ObservationError(
        f"{base_name}: strategy {_name(args)} does not apply; use one of {strategies}"
    )


def _name(args: QuantizationArgs) -> str:
    return str(getattr(args.strategy, "value", args.strategy))


def fuse_weight_observers(model: Module) -> None:
    """Link the weight observers of layers that share a global scale (q/k/v, gate/up).

    Groups are linked if their members are quantized as tensor_group (NVFP4). Members that are None
    are left out, as in attention that takes its values from its keys. A group is refused if only
    some members are quantized that way, or if their formats differ.

    :param model: model whose layers carry a `weight_observer`
    """
    from inlay.observers.base import Observer

    for name, parent in model.named_modules():
        for group in FUSED_LAYER_NAMES:
            if not all(hasattr(parent, member) for member in group):
                continue
            layers = {member: getattr(parent, member) for member in group}
            observers = {
                member: getattr(layer, "weight_observer", None)
                for member, layer in layers.items()
                if layer is not None
            }
            formats = {m: None if o is None else o.args for m, o in observers.items()}
            if not any(map(has_global_scale, formats.values())):
                continue
            problem = fusion_problem(formats)
            if problem is not None:
                raise ConfigurationError(
                    f"{name or 'the model'}: {', '.join(observers)} share one global scale and "
                    f"must be quantized alike, but differ ({problem}); target or ignore all of "
                    "them"
                )
            Observer.fuse(observer for observer in observers.values() if observer is not None)


def fusion_problem(members: Mapping[str, QuantizationArgs | None]) -> str | None:
    """Describe how the formats of layers that must share a global scale differ, if they do.

    Their observers may differ.

    :param members: maps names of layers to how their weights are quantized; None if they are not
    """
    formats = {member: _fused_format(args) for member, args in members.items()}
    if len(set(formats.values())) == 1:
        return None
    return ", ".join(f"{member}: {format}" for member, format in formats.items())


def has_global_scale(args: QuantizationArgs | None) -> bool:
    return args is not None and args.strategy == QuantizationStrategy.TENSOR_GROUP


def _fused_format(args: QuantizationArgs | None) -> str:
    if args is None:
        return "not quantized"
    if not has_global_scale(args):
        return "no global scale"
    scales = str(args.scale_dtype).removeprefix("torch.")
    return f"{args.type}{args.num_bits} in groups of {args.group_size} with scales in {scales}"


def lerp(start: torch.Tensor, end: torch.Tensor, weight: float) -> torch.Tensor:
    """Move from `start` to `end` by `weight`, also for dtypes that `torch.lerp` rejects."""
    return as_stored(as_stored(start * (1.0 - weight)) + as_stored(end * weight))


def as_stored(value: torch.Tensor) -> torch.Tensor:
    """Round a value to its dtype even where a compiler would not round it.

    Inductor computes bfloat16 in float32 and rounds only what it stores, so a moving average would
    differ from the eager one. It cannot remove rounding done by arithmetic on the bits. In eager
    mode values are rounded already, and this changes nothing.
    """
    if value.dtype != torch.bfloat16:
        return value
    return torch.where(value.isnan(), value, as_rounded(value.float(), value.dtype).to(value.dtype))
