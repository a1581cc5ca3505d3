"""Linear layers that multiply integers: the ops that stand in place of quantize-dequantize."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy, QuantizationType
from compressed_tensors.quantization.lifecycle import quantize

from inlay.nodes.quantize import parts_by_rows
from inlay.ranges.args import key_of
from inlay.torch_private import has_integer_product, integer_product

__all__ = [
    "DynamicQParams",
    "Quantize",
    "column_sums",
    "dynamic_qparams",
    "integer_linear",
    "integer_weight",
    "missing_kernels",
    "quantized",
    "unsupported_formats",
]

_BITS = 8
# Sums of so many products of two 8-bit integers, and their correction, fit into 32 bits.
_MOST_INPUTS = 2**16 - 1
_FEWEST_INPUTS = 2  # torch 2.13 returns wrong numbers for one


@dataclass(frozen=True, eq=False)
class _OfArgs:
    """A callable that depends on how a value is quantized, and on nothing else."""

    args: QuantizationArgs

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and key_of(self.args) == key_of(other.args)

    def __hash__(self) -> int:
        return hash(key_of(self.args))


def dynamic_qparams(
    value: torch.Tensor, bits: int, *, symmetric: bool, per_token: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute scale and zero point from the value itself, as compressed-tensors does.

    Its own functions keep tensors from one call to the next, which not every tracer can see.
    """
    value = value.detach()
    reduced = tuple(range(2, value.ndim))
    if per_token and reduced:
        low, high = value.amin(reduced, keepdim=True), value.amax(reduced, keepdim=True)
    else:  # a matrix has one scale, even if tokens are to have one each
        low, high = (extreme.reshape(1) for extreme in value.aminmax())
    low, high = low.clamp(max=0), high.clamp(min=0)
    lowest, highest = _range(bits)
    if symmetric:
        scale = torch.maximum(low.abs(), high.abs()) / ((highest - lowest) / 2)
        zero_point = torch.zeros_like(scale)
    else:
        scale = (high - low) / (highest - lowest)
        zero_point = (lowest - low / scale).clamp(lowest, highest).round()
    scale = torch.where(scale == 0, torch.finfo(scale.dtype).eps, scale)
    return scale, zero_point.to(torch.int8)


def quantized(
    value: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor | None, bits: int
) -> torch.Tensor:
    """Round a value to the integers that quantization stores, as compressed-tensors does."""
    scaled = value.detach() / scale
    if zero_point is not None:
        scaled = scaled + zero_point.to(value.dtype)
    return scaled.clamp(*_range(bits)).round().to(torch.int8)


class DynamicQParams(_OfArgs):
    """The callable of a node that computes scale and zero point from the value itself."""

    __name__ = "dynamic_qparams"

    def __call__(self, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        symmetric, per_token = self.args.symmetric, _is_per_token(self.args)
        return dynamic_qparams(value, self.args.num_bits, symmetric=symmetric, per_token=per_token)

    def examples(self, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return values without data for a value without data."""
        shape: list[Any] = [1]
        if _is_per_token(self.args) and value.ndim > 2:
            shape = [*value.shape[:2], *[1] * (value.ndim - 2)]
        dtype = value.dtype
        return (
            value.new_empty(shape, dtype=dtype),
            value.new_empty(shape, dtype=torch.int8),
        )


class Quantize(_OfArgs):
    """The callable of a node that rounds a value to the integers which quantization stores."""

    __name__ = "quantize"

    def __call__(
        self, value: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor | None = None
    ) -> torch.Tensor:
        return quantized(value, scale, zero_point, self.args.num_bits)


def integer_linear(
    integers: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    weight_scale: torch.Tensor,
    zero_point: torch.Tensor | None = None,
    sums: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return the linear layer of a dequantized value and weight, rounded once.

    The product of integers is exact, and so is its correction for the zero point. float64 keeps
    everything after it exact enough for float32; the same 512x576x1536 layer takes 1.03 ms with it
    and 0.96 ms without (AMD EPYC, one thread, Inductor). For 16 bits, float32 is enough.

    :param integers: the quantized input
    :param weight: int8, as `F.linear` takes it
    :param scale: of the input: one, or one per token with its dimensions kept
    :param weight_scale: one, or one per row
    :param zero_point: of the input, shaped like its scale; None for symmetric quantization
    :param sums: of the rows of the weight; needed with a zero point
    :param dtype: of the result
    """
    product = integer_product(integers, weight)
    if zero_point is not None and sums is not None:
        product = product - zero_point.to(torch.int32) * sums
    exact = torch.float64 if dtype in (torch.float32, torch.float64) else torch.float32
    result = product.to(exact) * (scale.to(exact) * weight_scale.reshape(-1).to(exact))
    if bias is not None:
        result = result + bias.to(exact)
    return result.to(dtype)


def integer_weight(
    weight: torch.Tensor, scale: torch.Tensor, args: QuantizationArgs
) -> torch.Tensor:
    """Return the integers that a weight is stored as."""
    parts = parts_by_rows(weight.detach(), args, {"scale": scale})
    found = [quantize(part, own["scale"], None, args, dtype=torch.int8) for part, own in parts]
    return found[0] if len(found) == 1 else torch.cat(found)


def column_sums(weight: torch.Tensor) -> torch.Tensor:
    """Return for each output what one zero point of the input adds to its product."""
    return weight.sum(dim=1, dtype=torch.int32)


def unsupported_formats(
    inputs: QuantizationArgs | None, weights: QuantizationArgs, in_features: int
) -> str | None:
    """Say why no integer product computes a layer with these formats; None if one does."""
    if inputs is None:
        return "its input is not quantized"
    problem = _unsupported_input(inputs) or _unsupported_weight(weights)
    if problem is None and in_features > _MOST_INPUTS:
        problem = f"sums over {in_features} inputs may not fit into 32 bits"
    if problem is None and in_features < _FEWEST_INPUTS:
        problem = "torch multiplies int8 matrices of one column wrongly"
    return problem


def _unsupported_input(args: QuantizationArgs) -> str | None:
    strategy = args.strategy
    if _is_wide(args):
        return f"its input has {_format(args)}"
    if strategy not in (QuantizationStrategy.TENSOR, QuantizationStrategy.TOKEN):
        return f"its input has scales per {_named(strategy)}"
    if args.zp_dtype not in (None, torch.int8):
        return f"its zero points are stored as {args.zp_dtype}"
    return f"its scales are stored as {args.scale_dtype}" if args.scale_dtype else None


def _unsupported_weight(args: QuantizationArgs) -> str | None:
    strategy = args.strategy
    if _is_wide(args):
        return f"its weight has {_format(args)}"
    if strategy not in (QuantizationStrategy.TENSOR, QuantizationStrategy.CHANNEL):
        return f"its weight has scales per {_named(strategy)}"
    return None if args.symmetric else "its weight has zero points"


def _range(bits: int) -> tuple[int, int]:
    return -(2 ** (bits - 1)), 2 ** (bits - 1) - 1


def _is_per_token(args: QuantizationArgs) -> bool:
    return bool(args.strategy == QuantizationStrategy.TOKEN)


def _is_wide(args: QuantizationArgs) -> bool:
    return bool(args.type != QuantizationType.INT or args.num_bits > _BITS)


def _format(args: QuantizationArgs) -> str:
    return f"{args.num_bits}-bit {getattr(args.type, 'value', args.type)} values"


def _named(strategy: QuantizationStrategy | str | None) -> str:
    return str(getattr(strategy, "value", strategy))


@cache
def missing_kernels(device: str) -> str | None:
    """Say why integer products do not pay on a kind of device; None if they do.

    It is looked up, not measured, so that the same command runs the same code. Products of
    512x576x1536 took 4.4 ms in float32, 1.08 in bfloat16 and 0.51 in int8; those of one row 0.047,
    0.066 and 0.008 (AMD EPYC with AVX-512 VNNI, two threads, medians). Without VNNI oneDNN widens
    the integers first.
    """
    if device != "cpu":
        return f"integer kernels run on a CPU, not on {device}"
    if not has_integer_product():
        return "this version of torch cannot multiply int8 matrices"
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return "this build of torch has no oneDNN"
    if not torch.cpu.get_capabilities().get("avx512_vnni", False):
        return "the processor has no AVX-512 VNNI"
    return None
