"""Search the range of a whole tensor from one count of its values.

The error of a candidate as defined reads every value again. A count of the values in small bins
bounds the errors of all candidates at once, and the bounds settle nearly all comparisons. Errors
are computed as defined for the others, so the result is that of the definition, bit for bit.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import torch
from compressed_tensors.quantization import QuantizationArgs

from inlay.formats.numbers import IntegerGrid, format_of
from inlay.ranges.powers import power_in_place
from inlay.ranges.rounding import format_range

__all__ = ["UNKNOWN", "Bounds", "best_candidate", "can_be_estimated", "estimate"]

_BINS = 2**15  # between the largest magnitude and its negative
_MANY = 2**15  # values from which bounds cost less than errors
_LEAST_STEP = 8  # bins in a quantization step from which bounds are tight
_CANDIDATES = 64  # whose errors are bounded at once, with 4 MiB each at the most
# Between this and its inverse nothing that an error consists of overflows or vanishes in float32.
_LARGEST = 1e20
# How far powers and sums may be off, as a share of the result, here and as defined.
_OF_SUMS = 1e-5
# How far a difference may be off, as a share of the value: quotient, product and difference are
# rounded to 2 ** -24 of it, here and as defined.
_OF_VALUE = 2.0**-21
# How far the border between two steps may be off, in steps, because a zero point is added before
# rounding.
_OF_STEP = 2.0**-16


class Bounds(NamedTuple):
    """The interval that holds an error, in units that all candidates share."""

    low: float
    high: float


UNKNOWN = Bounds(-math.inf, math.inf)


def can_be_estimated(
    observed: torch.Tensor, args: QuantizationArgs, norm: float, candidates: int
) -> bool:
    """Tell whether errors can be bounded: one group of many float32 values that become integers."""
    return (
        isinstance(format_of(args).grid, IntegerGrid)
        and norm >= 2
        and candidates <= _CANDIDATES
        and observed.dtype == torch.float32
        and observed.shape[1:-1].numel() == 1
        and observed.numel() >= _MANY
    )


class _Bins(NamedTuple):
    """How many values each used bin holds, and where they lie, in units of bins."""

    held: torch.Tensor
    mean: torch.Tensor
    share: torch.Tensor  # of the bin that lies below the mean


def estimate(
    observed: torch.Tensor,
    largest: float,
    scales: Sequence[float],
    zero_points: Sequence[float],
    args: QuantizationArgs,
    norm: float,
) -> list[Bounds]:
    """Bound the error of each candidate.

    Within a step, the error of a value is a convex function of it. So the values in a bin lose at
    least what their mean loses, and at most what its curvature adds to that. At the border between
    two steps the error is a tent with nearly straight sides, and a bin that holds the border loses
    up to its slope times the distances that the mean hides.

    :param largest: the largest magnitude of the values
    """
    width = 2 * largest / _BINS
    if not all(_is_moderate(each, norm) for each in (largest, *scales)):
        return [UNKNOWN] * len(scales)
    if min(scales) < _LEAST_STEP * width:
        return [UNKNOWN] * len(scales)
    bins = _count(observed, width)

    def column(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64, device=observed.device).unsqueeze(-1)

    scale, zero_point = column(scales) / width, column(zero_points)
    low, high = (end - zero_point for end in format_range(args))
    step = scale.float()
    place = (bins.mean / step).round_()
    nearest = place.clamp(low.float(), high.float())
    is_clipped = place != nearest
    distance = (bins.mean - nearest * step).abs_()
    to_border = step / 2 - distance
    error = power_in_place(distance, norm)

    misplaced = _BINS / 2 * _OF_VALUE + scale * _OF_STEP
    is_bent = (to_border <= 1 + misplaced.float()).logical_and_(~is_clipped)
    spread = bins.share * (1 - bins.share)
    hidden = 2 * spread - to_border * (1 - (1 - 2 * bins.share).abs())
    hidden = hidden.clamp_(min=0).mul_(is_bent)

    count = bins.held.double()
    sums = torch.stack([count, count * spread, count * bins.mean.abs() * _OF_VALUE], -1)
    of_all = sums.sum(0)
    bent, clipped = is_bent.double() @ count, is_clipped.double() @ sums
    slope, curvature = _rates(scale.squeeze(-1) / 2 + 1 + misplaced.squeeze(-1), norm)
    beyond = _BINS / 2 + 2 + (scale * torch.maximum(low, -high)).squeeze(-1)
    clipped_slope, clipped_curvature = _rates(beyond.clamp(min=1), norm)

    total = error.double() @ count
    either = slope * of_all[2] + clipped_slope * clipped[:, 2]
    either += bent * (2 * curvature + 3 * misplaced.squeeze(-1) * slope)
    below = total - either - slope * (hidden.double() @ count)
    above = total + either + (curvature * of_all[1] + clipped_curvature * clipped[:, 1]) / 2
    lows, highs = (below * (1 - _OF_SUMS)).tolist(), (above * (1 + _OF_SUMS)).tolist()
    return [Bounds(*both) for both in zip(lows, highs, strict=True)]


def _is_moderate(value: float, norm: float) -> bool:
    """Tell whether the power of a value neither overflows nor vanishes in float32."""
    return 0 < value < math.inf and abs(norm * math.log(value)) < math.log(_LARGEST)


def _count(observed: torch.Tensor, width: float) -> _Bins:
    place = observed.reshape(-1) * (1 / width)
    bins = place.floor()
    inside = place.sub_(bins).double()
    first = -_BINS // 2 - 1  # one more bin at either end, for values that rounding carries over
    index = bins.sub_(first).int()
    count = torch.bincount(index, minlength=_BINS + 2)
    offset = torch.bincount(index, weights=inside, minlength=_BINS + 2)
    used = count.nonzero().squeeze(-1)
    share = offset[used] / count[used]
    return _Bins(count[used], (used + first + share).float(), share.float())


def _rates(distance: torch.Tensor, norm: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return how steep and how curved errors are at a distance, where they are most so."""
    slope = norm * distance.pow(norm - 1)
    return slope, slope * (norm - 1) / distance


def best_candidate(
    bounds: Sequence[Bounds], patience: int | None, error: Callable[[int], float]
) -> int | None:
    """Try candidates in turn and return the first of the best; None if no error is finite.

    :param bounds: those of the error of each candidate
    :param patience: stop after so many candidates in a row that improved nothing
    :param error: computes the error of a candidate as defined
    """
    error = cache(error)

    def is_better(one: int, other: int | None) -> bool:
        own = bounds[one]
        if other is None:
            return own.high < math.inf or error(one) < math.inf
        best = bounds[other]
        if own.high < best.low or own.low > best.high:
            return own.high < best.low
        return error(one) < error(other)

    best, without_gain = None, 0
    for candidate in range(len(bounds)):
        if is_better(candidate, best):
            best, without_gain = candidate, 0
        else:
            without_gain += 1
        if patience is not None and without_gain >= patience:
            break
    return best
