"""Clipping: find the range inside the extremes that loses least, judged from a histogram."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy
from compressed_tensors.quantization.lifecycle import fake_quantize

from inlay.ranges.float_histogram import Histogram
from inlay.ranges.qparams import qparams_of_range
from inlay.ranges.search import RangeSearch

__all__ = ["ClipSearch", "Loss", "Range", "clip", "divergence", "quantization_error"]

# Maps minimum and maximum, of shape (candidates, *qparam_shape), to losses of that shape.
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Range = tuple[torch.Tensor, torch.Tensor]

_AT_ONCE = 1 << 20  # numbers processed together, to bound memory
_LINEAR_BINS = 2048
_UNLIKELY = 1e-9  # replaces a probability of zero, which has no logarithm


def clip(
    min_vals: torch.Tensor, max_vals: torch.Tensor, below: torch.Tensor, above: torch.Tensor
) -> Range:
    """Cut a range to at most `below` under zero and `above` over it."""
    low = torch.clamp(-below.to(min_vals.dtype), min_vals, max_vals)
    high = torch.clamp(above.to(max_vals.dtype), min_vals, max_vals)
    return low, high


@dataclass(frozen=True)
class _Found:
    """The best thresholds so far, and their loss."""

    below: torch.Tensor
    above: torch.Tensor
    loss: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class ClipSearch:
    """A search for the range with the smallest loss, first coarse, then fine.

    Candidates are evenly spaced on a logarithmic scale, from the extremes down to the first
    percentile of the nonzero magnitudes. A symmetric range has one threshold. An asymmetric range
    has two, searched in turns: one moves while the other stays.

    :param histogram: the observed values
    :param loss: the function to minimize
    :param symmetric: whether one threshold serves both ends
    :param grid: number of candidates of a coarse search; a fine one has half as many
    """

    histogram: Histogram
    loss: Loss
    symmetric: bool
    grid: int

    def __call__(self) -> Range:
        of = self.histogram
        below, above = (-of.min_vals).clamp(min=0).double(), of.max_vals.clamp(min=0).double()
        widest = torch.maximum(below, above)
        floor = self._floor(widest)

        whole = self.loss(of.min_vals.unsqueeze(0), of.max_vals.unsqueeze(0)).squeeze(0)
        found = _Found(widest, widest, whole)
        both = _geometric(widest, floor, self.grid)
        found = self._better(found, both, both)
        step = (widest / floor) ** (1 / (self.grid - 1))
        if self.symmetric:
            both = self._around(found.below, step)
            found = self._better(found, both, both)
        else:
            found = self._take_turns(found, below, above, floor, step)
        return clip(of.min_vals, of.max_vals, found.below, found.above)

    def _floor(self, widest: torch.Tensor) -> torch.Tensor:
        """Return the smallest threshold worth trying."""
        nonzero = self.histogram.without_zeros()
        if nonzero.mass.size(-1) == 0:
            return widest.clamp(min=torch.finfo(torch.float32).tiny)
        floor = nonzero.magnitudes().quantile(0.01)
        return torch.minimum(floor, widest).clamp(min=torch.finfo(torch.float32).tiny)

    def _take_turns(
        self,
        found: _Found,
        below: torch.Tensor,
        above: torch.Tensor,
        floor: torch.Tensor,
        step: torch.Tensor,
    ) -> _Found:
        found = self._better(found, found.below, _geometric(above, floor, self.grid))
        found = self._better(found, _geometric(below, floor, self.grid), found.above)
        for _ in range(2):
            found = self._better(found, found.below, self._around(found.above, step))
            found = self._better(found, self._around(found.below, step), found.above)
        return found

    def _around(self, threshold: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        """Space candidates between the neighbours of a threshold in the coarse search."""
        return _geometric(threshold * step, threshold / step, max(3, self.grid // 2))

    def _better(self, found: _Found, below: torch.Tensor, above: torch.Tensor) -> _Found:
        """Keep what was found or the best candidate, whichever loses less, for each group."""
        below, above = below + torch.zeros_like(above), above + torch.zeros_like(below)
        of = self.histogram
        losses = self.loss(*clip(of.min_vals, of.max_vals, below, above))
        # Never choose a candidate whose error overflowed.
        losses = losses.nan_to_num(nan=torch.inf, posinf=torch.inf)
        loss, best = losses.min(dim=0)
        better = loss < found.loss
        return _Found(
            torch.where(better, _pick(below, best), found.below),
            torch.where(better, _pick(above, best), found.above),
            torch.where(better, loss, found.loss),
        )


def quantization_error(histogram: Histogram, args: QuantizationArgs, norm: float) -> Loss:
    """Make the loss that sums |quantized - observed| ** norm over all values."""
    values, weights = histogram.points()
    # Add an axis for observations, as in an observed value, and one for candidates.
    values, weights = values[None, None], weights[None, None].float()
    error = RangeSearch(args=args, shrinks=(), norm=norm).error

    def loss(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
        return error(values, low, high, weights)

    return _in_parts(loss, values.numel())


def divergence(histogram: Histogram, args: QuantizationArgs) -> Loss:
    """Make the loss that is the Kullback-Leibler divergence caused by quantizing.

    As in TensorRT, the reference holds the clipped values at its ends. Its quantized form does not,
    and spreads the values of a quantization step evenly over the places that had any. Zeros are
    left out: every range represents zero exactly, and they would outweigh all other values.
    """
    histogram = histogram.without_zeros()
    if histogram.mass.size(-1) == 0:
        return lambda low, high: torch.zeros_like(low, dtype=torch.float64)

    def loss(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
        edges = _linear(low.double(), high.double(), _LINEAR_BINS + 1)
        below = histogram.mass_below(edges)
        inside = below.diff(dim=-1)
        reference = inside.clone()
        reference[..., 0] += below[..., 0]
        reference[..., -1] += histogram.total - below[..., -1]
        steps = _steps((edges[..., 1:] + edges[..., :-1]) / 2, low, high, args)
        return _kl(reference, _spread_evenly(inside, steps))

    return _in_parts(loss, _LINEAR_BINS * histogram.total.numel())


def _steps(
    values: torch.Tensor, low: torch.Tensor, high: torch.Tensor, args: QuantizationArgs
) -> torch.Tensor:
    """Number the quantization steps that rising values fall into."""
    scale, zero_point = qparams_of_range(low, high, args)
    per_row = args.model_copy(update={"strategy": QuantizationStrategy.TOKEN})
    quantized = fake_quantize(
        values.float(), scale.float().unsqueeze(-1), zero_point.unsqueeze(-1), per_row
    )
    changes: torch.Tensor = quantized.diff(dim=-1, prepend=quantized[..., :1]) != 0
    return changes.long().cumsum(dim=-1)


def _spread_evenly(mass: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    """Share the mass of each step evenly among its occupied places."""
    occupied = (mass > 0).to(mass.dtype)
    of_step = torch.zeros_like(mass).scatter_add_(-1, steps, mass)
    places = torch.zeros_like(mass).scatter_add_(-1, steps, occupied)
    return occupied * (of_step / places.clamp(min=1)).gather(-1, steps)


def _kl(reference: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    p, q = (t / t.sum(dim=-1, keepdim=True).clamp(min=1e-300) for t in (reference, other))
    return torch.xlogy(p, p / q.clamp(min=_UNLIKELY)).sum(dim=-1)


def _in_parts(loss: Loss, numbers: int) -> Loss:
    """Compute the same loss for a few candidates at a time."""
    at_once = max(1, _AT_ONCE // max(1, numbers))

    def in_parts(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
        parts = zip(torch.split(low, at_once), torch.split(high, at_once), strict=True)
        return torch.cat([loss(*part) for part in parts]).double()

    return in_parts


def _geometric(start: torch.Tensor, end: torch.Tensor, count: int) -> torch.Tensor:
    """Space numbers by equal factors from `start` to `end`, along a new first dimension."""
    tiny = torch.finfo(torch.float32).tiny
    logs = _linear(start.clamp(min=tiny).log(), end.clamp(min=tiny).log(), count)
    return logs.exp().movedim(-1, 0)


def _linear(start: torch.Tensor, end: torch.Tensor, count: int) -> torch.Tensor:
    """Space numbers evenly from `start` to `end`, along a new last dimension."""
    steps = torch.linspace(0, 1, count, dtype=start.dtype, device=start.device)
    return torch.lerp(start.unsqueeze(-1), end.unsqueeze(-1), steps)


def _pick(candidates: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return candidates.gather(0, index.unsqueeze(0)).squeeze(0)
