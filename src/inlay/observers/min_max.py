"""Observers whose range is the smallest and the largest value."""

from typing import ClassVar

import torch
from torch import distributed as dist

from inlay.observers.base import MinMaxTuple, Observer
from inlay.observers.helpers import as_stored, lerp
from inlay.observers.kwargs import AVERAGING_CONSTANT, Kwarg
from inlay.ranges.padding import fill_invalid

__all__ = [
    "MemorylessMinMaxObserver",
    "MinMaxObserver",
    "StaticMinMaxObserver",
    "average_into",
]


@Observer.register("memoryless_minmax")
class MemorylessMinMaxObserver(Observer):
    """Minimum and maximum of the last observed value."""

    _act_sync_dict = {}
    _kwargs: ClassVar[tuple[Kwarg, ...]] = ()

    def update_statistics_from_observed(self, observed: torch.Tensor) -> None:
        self.min_vals, self.max_vals = _min_max(observed)

    def update_statistics_from_valid(self, observed: torch.Tensor, valid: torch.Tensor) -> None:
        self.update_statistics_from_observed(fill_invalid(observed, valid))


@Observer.register("static_minmax")
class StaticMinMaxObserver(MemorylessMinMaxObserver):
    """Minimum and maximum of all observed values."""

    any_format = True
    _act_sync_dict = {"min_vals": dist.ReduceOp.MIN, "max_vals": dist.ReduceOp.MAX}
    _kwargs: ClassVar[tuple[Kwarg, ...]] = ()

    def update_statistics_from_observed(self, observed: torch.Tensor) -> None:
        min_vals, max_vals = _min_max(observed)
        if self.has_statistics:
            min_vals = torch.min(min_vals, self.min_vals)
            max_vals = torch.max(max_vals, self.max_vals)
        self.min_vals, self.max_vals = min_vals, max_vals


@Observer.register("minmax")
class MinMaxObserver(Observer):
    """Moving average of the minimum and maximum of each observed value."""

    any_format = True
    _act_sync_dict = {"min_vals": dist.ReduceOp.AVG, "max_vals": dist.ReduceOp.AVG}
    _kwargs = (AVERAGING_CONSTANT,)
    avg_constant: float

    def update_statistics_from_observed(self, observed: torch.Tensor) -> None:
        average_into(self, _min_max(observed), self.avg_constant)

    def update_statistics_from_valid(self, observed: torch.Tensor, valid: torch.Tensor) -> None:
        self.update_statistics_from_observed(fill_invalid(observed, valid))


def average_into(observer: Observer, found: MinMaxTuple, weight: float) -> None:
    """Move the observer's range towards the one just found; the first is taken as it is."""
    min_vals, max_vals = found
    # A weight of 1 forgets the past, which may be infinite: 0 * inf would not.
    if observer.has_statistics and weight != 1.0:
        min_vals = lerp(observer.min_vals, min_vals, weight)
        max_vals = lerp(observer.max_vals, max_vals, weight)
    observer.min_vals, observer.max_vals = min_vals, max_vals


def _min_max(observed: torch.Tensor) -> MinMaxTuple:
    min_vals, max_vals = torch.amin(observed, dim=(0, -1)), torch.amax(observed, dim=(0, -1))
    return as_stored(min_vals), as_stored(max_vals)
