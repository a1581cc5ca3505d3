"""An observer of weights that weighs rounding errors by what they do to the output."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy
from torch import distributed as dist

from inlay.errors import StatisticsError
from inlay.observers.base import Observer
from inlay.observers.kwargs import count, expansion, fraction, positive, switch
from inlay.observers.measuring import MeasuringObserver, Tensors
from inlay.observers.mse import shrink_factors
from inlay.ranges.candidates import Range, args_of_search
from inlay.ranges.qparams import qparams_of_range
from inlay.ranges.search import RangeSearch, differences

__all__ = ["LocalHessianObserver", "LocalHessianSearch"]

# Channels that share a block of the Hessian where the format does not set the size of groups.
_WIDEST = 128
# Scales of MX formats are powers of two, so ranges between two of them are the same.
_MX_SHRINKS = (1.0, 0.5, 2.0)


@Observer.register("local_hessian_mse")
class LocalHessianObserver(MeasuringObserver):
    """The range of a weight with the smallest output error, as far as a group alone decides it.

    The error of a group is δ H δᵀ, for its rounding errors δ and its block of the Hessian H, the
    sum of xᵀx over the tokens of the input. `imatrix_mse` uses the diagonal of H alone. For MX
    formats it tries the neighbouring exponents. Without data, the search is uniform and a warning
    says so; with `strict` an error is raised instead.
    """

    any_format = False
    observes_input = True
    _act_sync_dict = {"blocks": dist.ReduceOp.SUM}
    _kwargs = (
        fraction("maxshrink", 0.5),
        count("patience", 5),
        positive("grid", 20),
        expansion(),
        switch("strict", False),
    )

    maxshrink: float
    patience: int
    grid: float
    expand: float
    strict: bool
    blocks: ClassVar[torch.Tensor | None] = None  # until an input was observed

    @property
    def search(self) -> "LocalHessianSearch":
        is_mx = self.args.scale_dtype == torch.uint8
        steps = max(1, int(self.maxshrink * self.grid)) + 1
        return LocalHessianSearch(
            args=self.args,
            shrinks=_MX_SHRINKS if is_mx else shrink_factors(steps, self.grid),
            norm=2.0,
            patience=None if is_mx else self.patience or None,
            expand=self.expand,
            blocks=self._usable_blocks(),
        )

    def measure(self, observed: torch.Tensor, valid: torch.Tensor | None = None) -> Tensors:
        if valid is not None:
            observed = observed[valid]
        return dict(zip(("min_vals", "max_vals"), self.search(observed), strict=True))

    def measure_input(self, x: torch.Tensor, valid: torch.Tensor | None = None) -> Tensors:
        """Sum xᵀx of each block of channels over tokens."""
        rows = x.reshape(-1, x.size(-1)).to(torch.float32)
        if valid is not None:
            rows = torch.where(valid.unsqueeze(-1), rows, 0)
        width = _width(self.args, rows.size(-1))
        padded = torch.nn.functional.pad(rows, (0, -rows.size(-1) % width))
        groups = padded.view(len(rows), -1, width).permute(1, 2, 0)
        return {"blocks": groups @ groups.mT}

    @classmethod
    def divide_input(cls, statistics: Mapping[str, torch.Tensor], scales: torch.Tensor) -> Tensors:
        blocks = statistics["blocks"]
        count, width = blocks.shape[:2]
        own = torch.nn.functional.pad(scales.to(blocks), (0, count * width - len(scales)), value=1)
        own = own.view(count, 1, width)
        return {**statistics, "blocks": blocks / own / own.mT}

    def _usable_blocks(self) -> torch.Tensor | None:
        problem = self._problem()
        if problem is None:
            return self.blocks
        if self.strict:
            raise StatisticsError(
                f"{self.slot}: local_hessian_mse cannot weigh the error: {problem}; strict=False "
                "accepts a uniform search"
            )
        # Leave out the slot's name: Python shows the same text for all slots only once.
        warnings.warn(
            f"local_hessian_mse searches without a Hessian: {problem}; strict=True makes this an "
            "error",
            stacklevel=2,
        )
        return None

    def _problem(self) -> str | None:
        """Explain why the Hessian cannot be used; return None if it can."""
        if self.base_name != "weight":
            return "only weights have one"
        if self.blocks is None or not bool(self.blocks.any()):
            return "no input was observed, or only zeros"
        if not bool(torch.isfinite(self.blocks).all()):
            return "it is not finite"
        return None


@dataclass(frozen=True, kw_only=True, eq=False)
class LocalHessianSearch(RangeSearch):
    """A range search whose error is δ H δᵀ, for the rounding errors δ of each block of channels.

    :param blocks: of shape (blocks, width, width); None for the sum of squared errors
    """

    blocks: torch.Tensor | None = None

    @torch.no_grad()
    def __call__(
        self,
        observed: torch.Tensor,
        importance: torch.Tensor | None = None,
        *,
        compiled: bool | None = None,
    ) -> Range:
        return self.specification(observed)

    @torch.no_grad()
    def error(
        self,
        observed: torch.Tensor,
        min_vals: torch.Tensor,
        max_vals: torch.Tensor,
        importance: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if self.blocks is None:
            return super().error(observed, min_vals, max_vals)
        args = args_of_search(self.args)
        scale, zero_point = qparams_of_range(min_vals, max_vals, args)
        signed = differences(observed, scale, zero_point, args, absolute=False)
        return self._output_error(signed, min_vals.shape)

    def _output_error(self, errors: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Sum δ H δᵀ over what shares a scale.

        :param errors: in the layout of observed weights, which depends on the strategy
        """
        assert self.blocks is not None
        count, width = self.blocks.shape[:2]
        # (rows, blocks, width), where several rows may share a scale
        if self.args.strategy == QuantizationStrategy.BLOCK:
            height = errors.shape[-1] // width
            rows = errors.view(*errors.shape[1:3], height, width).transpose(1, 2).flatten(0, 1)
        else:
            rows = errors.reshape(-1, count, width)
        product = torch.bmm(rows.transpose(0, 1), self.blocks.to(rows)).transpose(0, 1)
        of_blocks = (product * rows).sum(-1)
        if self.args.strategy == QuantizationStrategy.BLOCK:
            of_blocks = of_blocks.view(shape[0], -1, count).sum(1)
        result: torch.Tensor = of_blocks.reshape(*shape, -1).sum(-1)
        return result


def _width(args: QuantizationArgs, columns: int) -> int:
    """Return how many channels share a block of the Hessian."""
    if args.strategy in (QuantizationStrategy.GROUP, QuantizationStrategy.TENSOR_GROUP):
        assert args.group_size is not None
        return int(args.group_size)
    if args.strategy == QuantizationStrategy.BLOCK:
        assert args.block_structure is not None
        return int(args.block_structure[1])
    return next(width for width in range(min(_WIDEST, columns), 0, -1) if columns % width == 0)
