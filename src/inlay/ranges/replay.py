"""Search the range of a single group from estimates, and compute only what they leave open.

Uncompiled, most of a search is spent on errors that are far from the best one. Estimates are
cheaper, and know how far they may be off; they settle nearly all comparisons. For the others the
errors are computed as defined. So the result is that of the definition, bit for bit.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationType

from inlay.ranges.powers import power_in_place
from inlay.ranges.rounding import format_range

__all__ = ["UNKNOWN", "Bounds", "Estimate", "best_candidate", "can_be_estimated"]

# Elements whose errors are estimated at once, so that they stay in the cache between operations.
_IN_CACHE = 2**17
_FEW = 2**12  # with fewer elements an estimate is not cheaper
# Between these nothing that an error consists of overflows or vanishes in float32.
_SMALLEST, _LARGEST = 1e-20, 1e20
# How far powers and sums may be off, as a share of the result: in an estimate and as defined.
_OF_SUMS = 1e-5
# How far a difference between a value and its quantized form may be off, as a share of the value:
# quotient, product and difference are rounded to 2 ** -24 of it, in the estimate and as defined.
_OF_DIFFERENCES = 2.0**-21


class Bounds(NamedTuple):
    """Where an error lies."""

    low: float
    high: float


UNKNOWN = Bounds(-math.inf, math.inf)


def can_be_estimated(observed: torch.Tensor, args: QuantizationArgs) -> bool:
    """Whether the values are one group in float32, many enough, to become integers."""
    return (
        args.type == QuantizationType.INT
        and observed.dtype == torch.float32
        and observed.shape[1:-1].numel() == 1
        and observed.numel() >= _FEW
    )


class Estimate:
    """Estimates the error of quantizing values with one scale.

    :param observed: the values
    :param largest: the largest magnitude among them
    :param norm: exponent of the error
    """

    def __init__(
        self, observed: torch.Tensor, largest: float, args: QuantizationArgs, norm: float
    ) -> None:
        self._parts = torch.split(observed.reshape(-1), _IN_CACHE)
        self._count, self._largest = observed.numel(), largest
        self._low, self._high = format_range(args)
        self._norm = norm
        room = torch.empty_like(self._parts[0])
        self._room = room, torch.empty_like(room)

    def __call__(self, scale: torch.Tensor, zero_point: torch.Tensor) -> Bounds:
        step, offset = float(scale), float(zero_point)
        unit = step**self._norm
        if not _SMALLEST < unit < _LARGEST:
            return UNKNOWN
        sums = [self._in_steps(part, 1 / step, offset) for part in self._parts]
        total = float(torch.stack(sums).sum(dtype=torch.float64))
        off = self._share_it_may_be_off(total, self._largest / step)
        if not off < 0.1 or not total * max(1.0, unit) < _LARGEST:
            return UNKNOWN
        return Bounds(total * unit * (1 - off), total * unit * (1 + off))

    def _in_steps(self, part: torch.Tensor, inverse: float, offset: float) -> torch.Tensor:
        """The error of some values in units of the scale."""
        scaled, rounded = (room[: len(part)] for room in self._room)
        torch.mul(part, inverse, out=scaled)
        # A zero point is a whole number, so it need not be added before rounding.
        torch.round(scaled, out=rounded)
        rounded.clamp_(self._low - offset, self._high - offset)
        return power_in_place(rounded.sub_(scaled).abs_(), self._norm).sum()

    def _share_it_may_be_off(self, total: float, largest: float) -> float:
        """Bound how far the sum of powers is off if each difference is, by Hölder's inequality."""
        if total <= 0:
            return math.inf
        typical = (total / self._count) ** (1 / self._norm)
        difference = largest * _OF_DIFFERENCES / typical
        of_powers = self._norm * difference if self._norm >= 1 else difference**self._norm
        return float(of_powers) + _OF_SUMS


def best_candidate(
    count: int,
    patience: int | None,
    estimate: Callable[[int], Bounds],
    error: Callable[[int], float],
) -> int | None:
    """Try candidates in turn and return the first of the best; None if no error is finite.

    :param patience: stop after so many candidates in a row that improved nothing
    :param estimate: where the error of a candidate lies
    :param error: the error as defined
    """
    estimate, error = cache(estimate), cache(error)

    def is_better(one: int, other: int | None) -> bool:
        own = estimate(one)
        if other is None:
            return own.high < math.inf or error(one) < math.inf
        best = estimate(other)
        if own.high < best.low or own.low > best.high:
            return own.high < best.low
        return error(one) < error(other)

    best, without_gain = None, 0
    for candidate in range(count):
        if is_better(candidate, best):
            best, without_gain = candidate, 0
        else:
            without_gain += 1
        if patience is not None and without_gain >= patience:
            break
    return best
