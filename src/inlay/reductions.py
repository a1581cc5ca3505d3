"""How statistics of several sources become those of all: the least, the largest, the sum, the mean.

A reduction packs a statistic into numbers that one operation, a maximum or a sum, merges, and
unpacks the result. Between ranks a collective applies that operation; for batches, stored runs and
whatever else is in one process, `merged` does. The arithmetic is the same everywhere.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed as dist

from inlay.errors import ConfigurationError

__all__ = ["AVERAGE", "MAXIMUM", "MINIMUM", "SUM", "Reduction", "merged", "reduction_of"]


class Reduction(ABC):
    """A rule for merging one statistic.

    :ivar operation: the operation of a collective that merges what is packed
    """

    operation: Any

    @abstractmethod
    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype that a statistic of `dtype` is packed into, wide enough to merge exactly."""

    @abstractmethod
    def pack(self, value: torch.Tensor, weight: int) -> torch.Tensor:
        """Flat numbers to merge, of a source that saw `weight` values."""

    @abstractmethod
    def nothing(self, shape: Sequence[int], wire: torch.dtype) -> torch.Tensor:
        """What a source that saw nothing packs: merging it changes nothing."""

    @abstractmethod
    def unpack(self, packed: torch.Tensor) -> torch.Tensor | None:
        """The merged statistic, flat and in the wire dtype; None if no source had any weight."""

    def start(self, dtype: torch.dtype) -> float | None:
        """The number to start from so that the first value is merged like any other, if any."""
        return None


class _Extremum(Reduction):
    """The smallest or largest value. Both travel as a maximum; a minimum is negated, exactly."""

    operation = dist.ReduceOp.MAX

    def __init__(self, *, minimum: bool) -> None:
        self.minimum = minimum

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        if not dtype.is_floating_point:
            return torch.int64
        return torch.promote_types(dtype, torch.float32)

    def pack(self, value: torch.Tensor, weight: int) -> torch.Tensor:
        value = self._turned(value.to(self.wire_dtype(value.dtype))).flatten()
        # A collective may drop NaN. Infinity survives, and is refused as well later.
        return value.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)

    def nothing(self, shape: Sequence[int], wire: torch.dtype) -> torch.Tensor:
        lowest = -torch.inf if wire.is_floating_point else torch.iinfo(wire).min
        return torch.full(tuple(shape), lowest, dtype=wire).flatten()

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        return self._turned(packed)

    def start(self, dtype: torch.dtype) -> float | None:
        if not dtype.is_floating_point:
            return None
        return torch.inf if self.minimum else -torch.inf

    def _turned(self, value: torch.Tensor) -> torch.Tensor:
        if not self.minimum:
            return value
        return -value if value.is_floating_point() else ~value


class _Sum(Reduction):
    """The sum of all sources."""

    operation = dist.ReduceOp.SUM

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float64 if dtype.is_floating_point else torch.int64

    def pack(self, value: torch.Tensor, weight: int) -> torch.Tensor:
        return value.to(self.wire_dtype(value.dtype)).flatten()

    def nothing(self, shape: Sequence[int], wire: torch.dtype) -> torch.Tensor:
        return torch.zeros(tuple(shape), dtype=wire).flatten()

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        return packed

    def start(self, dtype: torch.dtype) -> float | None:
        return 0.0


class _Average(Reduction):
    """The mean of all sources, each weighted by the number of values it saw."""

    operation = dist.ReduceOp.SUM

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float64

    def pack(self, value: torch.Tensor, weight: int) -> torch.Tensor:
        if weight == 0:
            return self.nothing(value.shape, torch.float64)
        weighted = (value.to(torch.float64) * weight).flatten()
        return torch.cat([weighted, weighted.new_tensor([weight])])

    def nothing(self, shape: Sequence[int], wire: torch.dtype) -> torch.Tensor:
        flat = torch.zeros(tuple(shape), dtype=wire).flatten()
        return torch.cat([flat, flat.new_zeros(1)])

    def unpack(self, packed: torch.Tensor) -> torch.Tensor | None:
        total = packed[-1]
        return None if int(total) == 0 else packed[:-1] / total


MINIMUM: Reduction = _Extremum(minimum=True)
MAXIMUM: Reduction = _Extremum(minimum=False)
SUM: Reduction = _Sum()
AVERAGE: Reduction = _Average()
_BY_NAME = {"MIN": MINIMUM, "MAX": MAXIMUM, "SUM": SUM, "AVG": AVERAGE}


def reduction_of(operation: Any, statistic: str) -> Reduction:
    """The reduction that an operation of `torch.distributed` names.

    :param statistic: the statistic it is for, named in the error
    """
    for name, reduction in _BY_NAME.items():
        if operation == getattr(dist.ReduceOp, name):
            return reduction
    raise ConfigurationError(
        f"{statistic} cannot be merged with {operation}; use one of {', '.join(_BY_NAME)}"
    )


def merged(reduction: Reduction, sources: Sequence[tuple[torch.Tensor, int]]) -> torch.Tensor:
    """Merge the statistic of several sources, each given with the number of values it saw."""
    first = sources[0][0]
    combine = torch.add if reduction.operation == dist.ReduceOp.SUM else torch.maximum
    packed = functools.reduce(combine, (reduction.pack(*source) for source in sources))
    result = reduction.unpack(packed)
    return first if result is None else result.reshape(first.shape).to(first.dtype)
