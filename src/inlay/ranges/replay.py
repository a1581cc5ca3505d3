"""Search the range of a single group from estimates, and compute only what they leave open.

Uncompiled, most of a search is spent on errors that are far from the best one. Estimates are
cheaper, and know how far they may be off; they settle nearly all comparisons. For the others the
errors are computed as defined. So the result is that of the definition, bit for bit.

`BinnedEstimate` reads the values once for all candidates. `Estimate`, for fewer values and for
errors that are not smooth, reads them for each candidate.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import NamedTuple

import torch
from compressed_tensors.quantization import QuantizationArgs

from inlay.formats.numbers import IntegerGrid, format_of
from inlay.ranges.powers import power_in_place
from inlay.ranges.rounding import format_range

__all__ = [
    "UNKNOWN",
    "BinnedEstimate",
    "Bounds",
    "Estimate",
    "best_candidate",
    "can_be_binned",
    "can_be_estimated",
    "has_estimates",
]

# Elements whose errors are estimated at once, so that they stay in the cache between operations.
_IN_CACHE = 2**17
_FEW = 2**12  # with fewer elements an estimate is not cheaper
# Between this and its inverse nothing that an error consists of overflows or vanishes in float32.
_LARGEST = 1e20
# How far powers and sums may be off, as a share of the result: in an estimate and as defined.
_OF_SUMS = 1e-5
# How far a difference between a value and its quantized form may be off, as a share of the value:
# quotient, product and difference are rounded to 2 ** -24 of it, in the estimate and as defined.
_OF_DIFFERENCES = 2.0**-21
# Equal bins for values in units of the whole range, from -1 to 1; for how many values they pay, and
# for how many their positions can be summed up.
_BINS = 2**16
_MANY, _MOST = 2**16, 2**20
_CANDIDATES = 64  # for which tables are kept, of 1.5 MB each
# How far a scale may be from the one that is tabulated, as a share of it.
_OF_SCALES = 1.8e-7
# How far a value may seem to lie from where it does: as a share of its bin, because positions are
# summed up; as a share of the value, because it is scaled, a step of a scale that is off, and both
# are rounded as defined; in steps, where a zero point is added before rounding.
_OF_BIN = 2.0**-12
_OF_VALUE = 2.0**-21
_OF_STEP = 2.0**-16


class Bounds(NamedTuple):
    """Where an error lies."""

    low: float
    high: float


UNKNOWN = Bounds(-math.inf, math.inf)


def has_estimates(args: QuantizationArgs, dtype: torch.dtype) -> bool:
    """Whether values of a dtype with one scale are searched from estimates, if they are many."""
    return isinstance(format_of(args).grid, IntegerGrid) and dtype == torch.float32


def can_be_estimated(observed: torch.Tensor, args: QuantizationArgs) -> bool:
    """Whether the values are one group in float32, many enough, to become integers."""
    return (
        has_estimates(args, observed.dtype)
        and observed.shape[1:-1].numel() == 1
        and observed.numel() >= _FEW
    )


def _is_moderate(value: float, norm: float) -> bool:
    """Whether the power of a value neither overflows nor vanishes in float32."""
    return 0 < value < math.inf and abs(norm * math.log(value)) < math.log(_LARGEST)


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

    def __call__(self, step: float, offset: float) -> Bounds:
        """Where the error lies for a scale and a zero point."""
        if not _is_moderate(step, self._norm):
            return UNKNOWN
        unit = step**self._norm
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


def can_be_binned(observed: torch.Tensor, norm: float, candidates: int) -> bool:
    """Whether the values are many enough for bins, and their errors smooth inside of one."""
    return norm >= 2 and _MANY <= observed.numel() < _MOST and candidates <= _CANDIDATES


class BinnedEstimate:
    """Estimates the errors of all candidates from one count of the values.

    Of each bin it knows how many values it holds and where they lie on average. What the error is
    there, and how steep, depends only on the share of the range that a candidate takes. So it is
    tabulated once for all searches of a kind, except for values that a candidate clips.

    :param observed: the values
    :param ends: the smallest and the largest of them
    :param qparams: scales and zero points of the candidates
    :param shrinks: the parts of the range that they take
    """

    def __init__(
        self,
        observed: torch.Tensor,
        ends: tuple[float, float],
        qparams: tuple[Sequence[float], Sequence[float]],
        shrinks: tuple[float, ...],
        args: QuantizationArgs,
        norm: float,
    ) -> None:
        self._bounds = [UNKNOWN] * len(shrinks)
        scales, zero_points = qparams
        low, high = format_range(args)
        shares = tuple(shrink / (high - low) for shrink in shrinks)
        unit = sum(scales) / sum(shares)
        are_tabulated = all(
            abs(scale - share * unit) <= _OF_SCALES * share * unit
            for scale, share in zip(scales, shares, strict=True)
        )
        is_moderate = _is_moderate(unit, norm) and _is_moderate(min(scales), norm)
        if not (are_tabulated and is_moderate and max(-ends[0], ends[1]) <= unit * (1 + 1e-5)):
            return
        limits = [[end - zero_point for zero_point in zero_points] for end in (low, high)]
        steps = _table_of(shares, norm, observed.device)
        count, offset = _count(observed, unit)
        inside, clipped = _parted(ends[0] / unit, ends[1] / unit, shares, limits)
        errors, off = steps.cost(count, offset, inside)
        beyond = torch.cat([torch.arange(*part, device=count.device) for part in clipped])
        beyond = beyond[count[beyond] > 0]
        if len(beyond):
            ends_of_steps = torch.tensor(limits, dtype=torch.float64, device=count.device)
            more = _tabulate(beyond, shares, norm, ends_of_steps.unsqueeze(-1)).cost(
                count[beyond], offset[beyond], slice(None)
            )
            errors, off = errors + more[0], off + more[1]
        off = off + _OF_SUMS * errors
        lows, highs = (errors - off).tolist(), (errors + off).tolist()
        self._bounds = [Bounds(*both) for both in zip(lows, highs, strict=True)]

    def __call__(self, index: int) -> Bounds:
        """Where the error of a candidate lies, in units that all candidates share."""
        return self._bounds[index]


def _count(observed: torch.Tensor, unit: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Count the values in each bin, and add up their distances from its middle in bins.

    Both come from one sum of 1 and a small multiple of the distance. In float64 they can be told
    apart again.
    """
    place = observed.reshape(-1) * (_BINS / 2 / unit)
    bin_ = place.floor()
    small = 2.0 ** -observed.numel().bit_length()
    weights = place.sub_(bin_).double().mul_(small).add_(1 - small / 2)
    total = torch.bincount(
        # One more bin at either end, for values that rounding carries over.
        bin_.add_(_BINS // 2 + 1).int(),
        weights=weights,
        minlength=_BINS + 2,
    )
    count = total.round()
    return count, total.sub_(count).div_(small)


def _parted(
    lowest: float, highest: float, shares: Sequence[float], limits: Sequence[Sequence[float]]
) -> tuple[slice, list[tuple[int, int]]]:
    """Tell the bins in which no candidate clips anything from those in which one may.

    :param limits: the first step of each candidate, and the last one
    """

    def bin_of(value: float) -> int:
        return math.floor(value * _BINS / 2) + _BINS // 2 + 1

    first, last = max(0, bin_of(lowest) - 1), min(_BINS + 1, bin_of(highest) + 1)
    ends = [[share * end for share, end in zip(shares, each, strict=True)] for each in limits]
    start = min(max(first, bin_of(max(ends[0])) + 2), last + 1)
    stop = max(start, min(last + 1, bin_of(min(ends[1])) - 1))
    return slice(start, stop), [(first, start), (stop, last + 1)]


class _Table(NamedTuple):
    """What values in a bin cost each candidate, of shape (candidates, bins).

    :param error: in the middle of the bin
    :param slope: how the error changes over the bin
    :param off: how far the error of a value may be off
    """

    error: torch.Tensor
    slope: torch.Tensor
    off: torch.Tensor

    def cost(
        self, count: torch.Tensor, offset: torch.Tensor, bins: slice
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What values in some bins cost each candidate, and how far that may be off."""
        error = self.error[:, bins] @ count[bins] + self.slope[:, bins] @ offset[bins]
        return error, self.off[:, bins] @ count[bins]


@lru_cache(maxsize=2)
def _table_of(shares: tuple[float, ...], norm: float, device: torch.device) -> _Table:
    """Tabulate what values in all bins cost that nobody clips."""
    above = _tabulate(torch.arange(_BINS // 2 + 1, _BINS + 2, device=device), shares, norm)
    below = _Table(above.error.flip(-1), -above.slope.flip(-1), above.off.flip(-1))
    return _Table(*(torch.cat(halves, dim=-1) for halves in zip(below, above, strict=True)))


def _tabulate(
    bins: torch.Tensor,
    shares: tuple[float, ...],
    norm: float,
    limits: torch.Tensor | None = None,
) -> _Table:
    """Compute what values in some bins cost if they are quantized with some scales.

    The error of a value is its distance to the next step, to a power of at least 2. It is smooth
    and curved upwards but for the kinks halfway between two steps. Values that every candidate
    rounds to zero cost all the same, so nothing that is compared is off by them.

    :param limits: the first and the last step of each candidate
    """
    width = 2 / _BINS
    middle = (bins.double() - _BINS / 2 - 0.5) * width
    scale = torch.tensor(shares, dtype=torch.float64, device=bins.device).unsqueeze(-1)
    position = middle / scale
    step = position.round()
    kink = (0.5 - (position - step).abs()) * scale  # how far away the next one is
    if limits is not None:
        clipped = step.clamp(*limits)
        kink.masked_fill_(clipped != step, torch.inf)
        step = clipped
    away = middle - step * scale
    distance = away.abs()
    slope = norm * distance.pow(norm - 1)
    error = slope * distance / norm
    largest = distance + width
    curvature = norm * (norm - 1) * largest.pow(norm - 2)
    steepest = curvature * largest / (norm - 1)
    # A line lies below a curve by up to this much, so half of it is added to what the line gives.
    curved = curvature * width**2 / 16
    # Beside a kink, errors rise towards it and fall behind it. They lie between two parallel lines:
    # one through the kink, less steep than errors are on the way to it, and one through the far end
    # of the bin. A little more than half a bin counts as beside, because values may be misplaced.
    half = width * 0.51
    is_bent = kink <= half
    tilt = norm * (distance - half).clamp_(min=0).pow(norm - 1) * kink.clamp(max=half) / half
    between = (steepest - tilt) * (kink.clamp(max=half) + half)
    bent = between / 2 + steepest * scale * _OF_STEP
    misplaced = width * _OF_BIN + middle.abs() * _OF_VALUE
    off = torch.where(is_bent, bent, curved) + steepest * misplaced
    is_common = middle.abs() + 2 * width <= min(shares) / 2
    off[:, is_common] = 0
    curved[:, is_common] = 0
    return _Table(
        error=error + torch.where(is_bent, between / 2 - (steepest - tilt) * half, curved),
        slope=torch.where(is_bent, tilt, slope) * away.sign() * width,
        off=off,
    )


def best_candidate(
    count: int,
    patience: int | None,
    estimate: Callable[[int], Bounds],
    error: Callable[[int], float],
) -> int | None:
    """Try candidates in turn and return the first of the best; None if no error is finite.

    :param patience: stop after so many candidates in a row that improved nothing
    :param estimate: where the error of a candidate lies, in units that all candidates share
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
