"""Observers whose range is the part of the observed range that loses least."""

from collections.abc import Sequence

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy, QuantizationType

from inlay.observers.base import Observer
from inlay.observers.kwargs import (
    AVERAGING_CONSTANT,
    Kwarg,
    count,
    expansion,
    fraction,
    positive,
)
from inlay.observers.measuring import MeasuringObserver, Tensors
from inlay.observers.min_max import MovingAverage
from inlay.ranges.search import RangeSearch

__all__ = [
    "FourOverSixObserver",
    "MemorylessMSEObserver",
    "MovingAverageMSEObserver",
    "NVFP4ExpandedMSEObserver",
    "shrink_factors",
]

_SEARCH_KWARGS: tuple[Kwarg, ...] = (
    fraction("maxshrink", 0.20),
    count("patience", 5),
    positive("grid", 100.0),
    positive("norm", 2.4),
    expansion(),
)


@Observer.register("memoryless_mse")
class MemorylessMSEObserver(MeasuringObserver):
    """The range with the smallest quantization error on the last observed value.

    The search starts at `expand` times the observed range and takes `maxshrink * grid` steps of
    `1 / grid` of it, until `patience` steps in a row improve no group. The error is the sum of
    `|quantized - observed| ** norm`.
    """

    _act_sync_dict = {}
    _kwargs = _SEARCH_KWARGS

    maxshrink: float
    patience: int
    grid: float
    norm: float
    expand: float

    @property
    def search(self) -> RangeSearch:
        return RangeSearch(
            args=self.args,
            shrinks=shrink_factors(int(self.maxshrink * self.grid), self.grid),
            norm=self.norm,
            # A patience of 0 stops at the first step without improvement, as 1 does.
            patience=max(1, self.patience),
            expand=self.expand,
        )

    @classmethod
    def saved_by_compiling(cls, args: QuantizationArgs) -> float:
        is_one_group = args.strategy == QuantizationStrategy.TENSOR
        return 0.0 if is_one_group and args.type == QuantizationType.INT else 20.0

    def measure(self, observed: torch.Tensor, valid: torch.Tensor | None = None) -> Tensors:
        found = self.search(observed) if valid is None else self.search.among(observed, valid)
        return dict(zip(("min_vals", "max_vals"), found, strict=True))

    @classmethod
    def measure_weights(
        cls, observers: Sequence[MeasuringObserver], observed: torch.Tensor
    ) -> Tensors:
        first = observers[0]
        assert isinstance(first, MemorylessMSEObserver)
        return dict(zip(("min_vals", "max_vals"), first.search.each(observed), strict=True))


@Observer.register("mse")
class MovingAverageMSEObserver(MovingAverage, MemorylessMSEObserver):
    """Moving average of the best range of each observed value."""

    _act_sync_dict = MovingAverage._act_sync_dict
    _kwargs = (*_SEARCH_KWARGS, AVERAGING_CONSTANT)


@Observer.register("nvfp4_expanded_mse")
class NVFP4ExpandedMSEObserver(MemorylessMSEObserver):
    """The range with the smallest error among 1.8 to 0.8 times the observed one, for FP4.

    The largest numbers of FP4, 4 and 6, lie far apart. A wider range lets the largest value of a
    group round to 4 instead, which often serves the other values better.
    """

    _kwargs = (
        fraction("maxshrink", 1 - 0.8 / 1.8),
        count("patience", 1000),
        positive("grid", 200.0),
        positive("norm", 2.4),
        expansion(1.8),
    )


@Observer.register("fouroversix")
class FourOverSixObserver(NVFP4ExpandedMSEObserver):
    """Another name of `nvfp4_expanded_mse`, as in llm-compressor."""


def shrink_factors(steps: int, grid: float) -> tuple[float, ...]:
    """Return the factors of `steps` candidates, each smaller than the last by `1 / grid`."""
    return tuple(1 - step / grid for step in range(steps))
