"""Rounding single columns of weights to the grid that their scales span."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy
from compressed_tensors.quantization.lifecycle import fake_quantize

from inlay.errors import ConfigurationError

__all__ = ["Grid"]

_WIDENED = {
    QuantizationStrategy.TENSOR,
    QuantizationStrategy.CHANNEL,
    QuantizationStrategy.GROUP,
    QuantizationStrategy.TENSOR_GROUP,
    QuantizationStrategy.BLOCK,
}


@dataclass(frozen=True, eq=False)
class Grid:
    """The scale and zero point of each value of a batch of weights, column by column.

    :param scale: of shape (batch, columns, rows), with the global scale divided out
    :param zero_point: of the same shape; None if the format is symmetric
    """

    args: QuantizationArgs
    scale: torch.Tensor
    zero_point: torch.Tensor | None

    @classmethod
    def of(
        cls,
        args: QuantizationArgs,
        shape: tuple[int, int],
        scale: torch.Tensor,
        zero_point: torch.Tensor | None = None,
        global_scale: torch.Tensor | None = None,
    ) -> "Grid":
        """Widen stacked qparams to one for each value.

        :param shape: rows and columns of one weight
        :param scale: stacked along a first dimension, otherwise as the observer gives it
        """
        if args.strategy not in _WIDENED:
            raise ConfigurationError(
                f"GPTQ cannot compensate weights with strategy {args.strategy}; use tensor, "
                "channel, group, tensor_group or block"
            )
        scale = scale.to(torch.float32)
        if global_scale is not None:
            scale = scale / global_scale.reshape(-1, *[1] * (scale.ndim - 1)).to(torch.float32)
        keeps_zero_points = zero_point is not None and not args.symmetric
        return cls(
            # The rounding of one column is the rounding of channels, each with its own scale.
            args.model_copy(update={"strategy": QuantizationStrategy.CHANNEL}),
            _widened(scale, args, shape),
            _widened(zero_point, args, shape)
            if keeps_zero_points and zero_point is not None
            else None,
        )

    @classmethod
    def joined(cls, grids: "Sequence[Grid]", *, rows: bool) -> "Grid":
        """Return the grid of weights below each other, if `rows`, or of one batch after another."""
        dim = 2 if rows else 0
        zero_points = [each.zero_point for each in grids if each.zero_point is not None]
        return cls(
            grids[0].args,
            torch.cat([each.scale for each in grids], dim),
            torch.cat(zero_points, dim) if zero_points else None,
        )

    def reordered(self, order: torch.Tensor) -> "Grid":
        """Return the grid of weights whose columns are taken in another order."""

        def taken(qparam: torch.Tensor) -> torch.Tensor:
            pairs = zip(qparam, order, strict=True)
            return torch.stack([each.index_select(0, own) for each, own in pairs])

        zero_point = None if self.zero_point is None else taken(self.zero_point)
        return Grid(self.args, taken(self.scale), zero_point)

    def rounded(self, values: torch.Tensor, columns: int | slice) -> torch.Tensor:
        """Round some columns, of shape (batch, [columns,] rows), to the grid."""
        zero_point = None if self.zero_point is None else self.zero_point[:, columns]
        result: torch.Tensor = fake_quantize(values, self.scale[:, columns], zero_point, self.args)
        return result


def _widened(qparam: torch.Tensor, args: QuantizationArgs, shape: tuple[int, int]) -> torch.Tensor:
    """One value for each value of the weights, with columns before rows."""
    rows, columns = shape
    batch = len(qparam)
    if args.strategy == QuantizationStrategy.TENSOR:
        wide = qparam.reshape(batch, 1, 1)
    else:
        wide = qparam.reshape(batch, -1, qparam.shape[-1])
    height, width = 1, 1
    if args.strategy == QuantizationStrategy.BLOCK:
        assert args.block_structure is not None
        height, width = args.block_structure
    elif args.strategy in (QuantizationStrategy.GROUP, QuantizationStrategy.TENSOR_GROUP):
        assert args.group_size is not None
        width = args.group_size
    wide = wide.repeat_interleave(height, 1) if height > 1 else wide
    wide = wide.repeat_interleave(width, 2) if width > 1 else wide
    wide = wide[:, :rows, :columns]  # the last block may be a part of one
    return wide.expand(batch, rows, columns).transpose(1, 2).contiguous()
