"""Quantization as nodes of a graph, computed by compressed-tensors."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy
from compressed_tensors.quantization.lifecycle import fake_quantize
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

from inlay.observers import QParamsDict
from inlay.ranges.args import key_of
from inlay.ranges.row_groups import RowGroups

__all__ = ["QuantizeDequantize", "fold_weight", "parts_by_rows"]

_AT_ONCE = 1 << 18  # values: what is computed from them on the way stays in a cache
_ROWS_TOGETHER = 32  # at least: zero points of so many are packed into whole words
_BY_ROWS = (
    QuantizationStrategy.TENSOR,
    QuantizationStrategy.CHANNEL,
    QuantizationStrategy.GROUP,
    QuantizationStrategy.TENSOR_GROUP,
    QuantizationStrategy.BLOCK,
)


@dataclass(frozen=True, eq=False)
class QuantizeDequantize:
    """The callable of a quantize-dequantize node: what the quantized model will see of a value.

    If the rows of the value stand in groups, it takes the qparams of all groups along a first
    dimension, and where the rows of each group end.

    :param args: how the value is quantized
    :param names: which qparams follow the value, of scale, zero_point and global_scale; those
        that are missing are computed from the value itself
    """

    args: QuantizationArgs
    names: tuple[str, ...]
    __name__ = "quantize_dequantize"

    @property
    def key(self) -> tuple[str, tuple[str, ...]]:
        return key_of(self.args), self.names

    def __eq__(self, other: object) -> bool:
        return isinstance(other, QuantizeDequantize) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __call__(
        self, value: torch.Tensor, *qparams: torch.Tensor, ends: torch.Tensor | None = None
    ) -> torch.Tensor:
        given = dict(zip(self.names, qparams, strict=True))
        if ends is None:
            return self.quantized(value, given)
        if not given:
            # A row is a token, which compressed-tensors looks for in a second dimension: without
            # one it would give all rows of all groups one scale.
            return self.quantized(value.unsqueeze(0), {}).squeeze(0)
        number = RowGroups(ends).numbers(len(value)).clamp(max=len(ends) - 1)
        return self.quantized(value, {name: of_all[number] for name, of_all in given.items()})

    def quantized(self, value: torch.Tensor, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Quantize and dequantize a value by the qparams that are given, computing the others."""
        global_scale = given.get("global_scale")
        if "scale" in given:
            scale, zero_point = given["scale"], given.get("zero_point")
        else:
            scale, zero_point = compute_dynamic_scales_and_zp(
                value=value, args=self.args, module=None, global_scale=global_scale
            )
        if global_scale is not None and global_scale.ndim > 1:
            global_scale = global_scale.unsqueeze(-1)  # of rows, which have several groups
        result: torch.Tensor = fake_quantize(
            value, scale, zero_point, self.args, global_scale=global_scale
        )
        return result


def fold_weight(weight: torch.Tensor, args: QuantizationArgs, qparams: QParamsDict) -> torch.Tensor:
    """The weight as the quantized model will see it."""
    given = {name: value for name, value in qparams.items() if isinstance(value, torch.Tensor)}
    parts = [
        fake_quantize(
            part,
            own["scale"],
            own.get("zero_point"),
            args,
            global_scale=own.get("global_scale"),
        )
        for part, own in parts_by_rows(weight.detach(), args, given)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def parts_by_rows(
    weight: torch.Tensor, args: QuantizationArgs, qparams: Mapping[str, torch.Tensor]
) -> Iterator[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    """Yield some rows of a weight after others, each with the qparams that belong to them.

    Quantization computes value by value, in many steps. Some rows at a time, no step needs memory
    for a whole weight, which the system would have to clear first.

    :param qparams: by names that end in scale, zero_point or global_scale; those that belong to all
        rows are yielded as they are
    """
    height = 1  # rows that share a scale
    if args.strategy == QuantizationStrategy.BLOCK and args.block_structure is not None:
        height = args.block_structure[0]
    together = math.lcm(_ROWS_TOGETHER, height)
    at_once = _AT_ONCE * len(weight) // max(1, weight.numel())
    rows = max(together, at_once // together * together)
    if args.strategy not in _BY_ROWS or weight.dim() != 2 or rows >= len(weight):
        yield weight, dict(qparams)
        return

    def of_rows(name: str, value: torch.Tensor) -> torch.Tensor:
        if name.endswith("global_scale") or args.strategy == QuantizationStrategy.TENSOR:
            return value
        return value[begin // height : math.ceil(end / height)]

    for begin in range(0, len(weight), rows):
        end = min(begin + rows, len(weight))
        yield weight[begin:end], {name: of_rows(name, value) for name, value in qparams.items()}
