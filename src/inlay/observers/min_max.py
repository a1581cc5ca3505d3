"""Observers whose range goes from the smallest to the largest value."""

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import distributed as dist

from inlay.observers.base import Observer
from inlay.observers.helpers import as_stored, lerp
from inlay.observers.kwargs import AVERAGING_CONSTANT, Kwarg
from inlay.observers.measuring import MeasuringObserver, Tensors
from inlay.ranges.candidates import is_traced
from inlay.ranges.padding import fill_invalid
from inlay.ranges.row_groups import RowGroups

__all__ = [
    "MemorylessMinMaxObserver",
    "MinMaxObserver",
    "MovingAverage",
    "StaticMinMaxObserver",
]


@Observer.register("memoryless_minmax")
class MemorylessMinMaxObserver(MeasuringObserver):
    """Minimum and maximum of the last observed value."""

    _act_sync_dict = {}
    _kwargs: ClassVar[tuple[Kwarg, ...]] = ()

    def measure(self, observed: torch.Tensor, valid: torch.Tensor | None = None) -> Tensors:
        return _min_max(observed, valid)

    def measure_row_groups(self, observed: torch.Tensor, groups: RowGroups) -> Tensors:
        return _min_max_of_row_groups(observed, groups)

    @classmethod
    def measure_weights(
        cls, observers: Sequence[MeasuringObserver], observed: torch.Tensor
    ) -> Tensors:
        return _min_max(observed.unsqueeze(0), None)


@Observer.register("static_minmax")
class StaticMinMaxObserver(MemorylessMinMaxObserver):
    """Minimum and maximum of all observed values."""

    any_format = True
    follows_channels = True
    _act_sync_dict = {"min_vals": dist.ReduceOp.MIN, "max_vals": dist.ReduceOp.MAX}
    _kwargs: ClassVar[tuple[Kwarg, ...]] = ()


class MovingAverage(MeasuringObserver):
    """An observer that moves its range towards that of each new value by a constant fraction.

    The first value sets the range. So the order of values matters: the latest of `n` weighs `c`,
    the one before it `c (1 - c)`, and the first `(1 - c) ** (n - 1)`.

    Over ranks, and over runs that are merged, each follows its own values, and the averages are
    weighed by their numbers: a value weighs what it does on its rank, times the share of that rank
    in all values. So more ranks forget less.
    """

    _act_sync_dict = {"min_vals": dist.ReduceOp.AVG, "max_vals": dist.ReduceOp.AVG}
    avg_constant: float

    def follow(self, before: Mapping[str, torch.Tensor], measured: Tensors) -> Tensors:
        # A constant of 1 forgets the past, but if that is infinite, 0 * inf gives NaN.
        if self.avg_constant == 1.0:
            return measured
        return {
            name: lerp(before[name], value, self.avg_constant) for name, value in measured.items()
        }


@Observer.register("minmax")
class MinMaxObserver(MovingAverage):
    """Moving average of the minimum and maximum of each observed value."""

    any_format = True
    _kwargs = (AVERAGING_CONSTANT,)

    def measure(self, observed: torch.Tensor, valid: torch.Tensor | None = None) -> Tensors:
        return _min_max(observed, valid)

    def measure_row_groups(self, observed: torch.Tensor, groups: RowGroups) -> Tensors:
        return _min_max_of_row_groups(observed, groups)


def _min_max(observed: torch.Tensor, valid: torch.Tensor | None) -> Tensors:
    if valid is not None:
        observed = fill_invalid(observed, valid)
    low, high = _extremes(observed)
    return {"min_vals": as_stored(low), "max_vals": as_stored(high)}


def _min_max_of_row_groups(observed: torch.Tensor, groups: RowGroups) -> Tensors:
    # Rows first: a compiled graph takes these while it makes the value, and few numbers are left.
    low, high = groups.least(observed.amin(-1)), groups.largest(observed.amax(-1))
    return {"min_vals": as_stored(low), "max_vals": as_stored(high)}


def _extremes(observed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The smallest and the largest value of each group."""
    shape = observed.shape[1:-1]
    if math.prod(shape) != 1 or is_traced(observed):
        return torch.amin(observed, dim=(0, -1)), torch.amax(observed, dim=(0, -1))
    low, high = torch.aminmax(observed)  # reads the value once
    return low.reshape(shape), high.reshape(shape)
