"""Clipping: find the range inside the extremes that loses least, judged from a histogram."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy
from compressed_tensors.quantization.lifecycle import fake_quantize

from inlay.formats.numbers import format_of
from inlay.ranges.candidates import error_dtype
from inlay.ranges.float_histogram import Histogram
from inlay.ranges.powers import power_in_place
from inlay.ranges.qparams import qparams_of_range
from inlay.ranges.search import differences

__all__ = ["ClipSearch", "Loss", "Range", "clip", "divergence", "quantization_error"]

# Maps minimum and maximum, of shape (candidates, *qparam_shape), to float64 losses of that shape.
# The third argument is a bound for each group; a loss above it may be returned as infinite.
Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Range = tuple[torch.Tensor, torch.Tensor]

_BLOCK = 1024  # points whose errors are summed in float32; sums of blocks are added in float64
_TILE = 256  # blocks processed together: one mebibyte, which stays in the cache
_AT_ONCE = 1 << 20  # numbers of linear histograms processed together, to bound memory
_LINEAR_BINS = 2048
_SAMPLE = 8  # one of so many candidates is judged first, to give up most of the others early
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

        unbounded = torch.full_like(widest, torch.inf)
        whole = self.loss(of.min_vals.unsqueeze(0), of.max_vals.unsqueeze(0), unbounded).squeeze(0)
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
        tiny = torch.finfo(torch.float32).tiny
        nonzero = self.histogram.without_zeros().magnitudes()
        if nonzero.mass.size(-1) == 0:
            return widest.clamp(min=tiny)
        floor = torch.where(nonzero.total > 0, nonzero.quantile(0.01), widest)
        return torch.minimum(floor, widest).clamp(min=tiny)

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
        """Keep the better of the current range and the best candidate, for each group."""
        below, above = below + torch.zeros_like(above), above + torch.zeros_like(below)
        of = self.histogram
        low, high = clip(of.min_vals, of.max_vals, below, above)
        losses = torch.empty_like(below)
        first = torch.arange(len(losses), device=losses.device) % _SAMPLE == 0
        bound = found.loss
        for part in (first, ~first):
            # Never choose a candidate whose error overflowed.
            losses[part] = self.loss(low[part], high[part], bound).nan_to_num(torch.inf, torch.inf)
            bound = torch.minimum(bound, losses[part].amin(dim=0))
        loss, best = losses.min(dim=0)
        better = loss < found.loss
        return _Found(
            torch.where(better, _pick(below, best), found.below),
            torch.where(better, _pick(above, best), found.above),
            torch.where(better, loss, found.loss),
        )


class _Points:
    """Values with weights, whose quantization errors are summed in blocks of falling magnitude.

    Blocks come in this order so that a candidate is done early. Values below a quarter of its
    smallest step become zero, in any dtype and with any zero point, and cost the same for every
    such candidate. And as errors only add up, a candidate may be given up as soon as it loses more
    than another one does in all.

    A group's loss is the same number whatever groups are beside it: each block is summed by
    itself, and the sums of blocks are added in float64 in their order.
    """

    def __init__(self, histogram: Histogram, args: QuantizationArgs, norm: float) -> None:
        self.args, self.norm = args, norm
        values, weights = (part.flatten(0, -2) for part in histogram.points())
        values = values.masked_fill(weights == 0, 0)
        order = values.abs().argsort(dim=-1, descending=True, stable=True)
        # Of shape (blocks, groups, block), so that the same block of some groups is copied fast.
        self.values = _in_blocks(values.gather(-1, order))
        self.weights = _in_blocks(weights.gather(-1, order).to(error_dtype(values)))
        self.largest = self.values[..., 0].abs().double()
        as_zero = self._sums(self.values.to(self.weights.dtype).abs(), self.weights)
        # The loss of each block and all after it, if all of their values become zero.
        rest = as_zero.double().flip(0).cumsum(0).flip(0)
        self.rest = torch.cat([rest, torch.zeros_like(rest[:1])])

    def loss(self, low: torch.Tensor, high: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
        scale, zero_point = (part.flatten() for part in qparams_of_range(low, high, self.args))
        blocks, groups, _ = self.values.shape
        group = torch.arange(groups, device=low.device).repeat(len(low))
        visible = scale.double() * (format_of(self.args).grid.smallest_step / 4)
        needed = (self.largest[:, group] >= visible).sum(0)
        loss = self.rest[needed, group]
        bound = bound.expand_as(low).flatten()

        start = 0
        while start < blocks:
            alive = ((needed > start) & ~(loss > bound)).nonzero().squeeze(-1)
            stop = min(blocks, start + max(1, _TILE // max(1, len(alive))))
            number = torch.arange(start, stop, device=low.device).unsqueeze(-1)
            for rows in torch.split(alive, _TILE):
                values, weights = self._tile(slice(start, stop), group[rows])
                errors = differences(values, scale[rows], zero_point[rows], self.args)
                sums = self._sums(errors, weights).double().masked_fill(number >= needed[rows], 0)
                loss[rows] = torch.cat([loss[rows].unsqueeze(0), sums]).cumsum(0)[-1]
            start = stop
        return loss.masked_fill(loss > bound, torch.inf).reshape(low.shape)

    def _tile(self, blocks: slice, groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the values and weights of these blocks, for each row those of its group."""
        values, weights = self.values[blocks], self.weights[blocks]
        if values.size(1) == 1:
            return values, weights
        return values.index_select(1, groups), weights.index_select(1, groups)

    def _sums(self, differences: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return power_in_place(differences, self.norm).mul_(weights).sum(-1)


def _in_blocks(points: torch.Tensor) -> torch.Tensor:
    """Divide points into blocks, filled up with zeros, which every range represents exactly."""
    filled = torch.nn.functional.pad(points, (0, -points.size(-1) % _BLOCK))
    return filled.reshape(len(filled), -1, _BLOCK).transpose(0, 1).contiguous()


def quantization_error(histogram: Histogram, args: QuantizationArgs, norm: float) -> Loss:
    """Make the loss that sums |quantized - observed| ** norm over all values."""
    return _Points(histogram, args, norm).loss


def divergence(histogram: Histogram, args: QuantizationArgs) -> Loss:
    """Make the loss that is the Kullback-Leibler divergence caused by quantizing.

    As in TensorRT, the reference holds the clipped values at its ends. Its quantized form does not,
    and spreads the values of a quantization step evenly over the places that had any. Zeros are
    left out: every range represents zero exactly, and they would outweigh all other values.
    """
    histogram = histogram.without_zeros()
    if histogram.mass.size(-1) == 0:
        return lambda low, high, bound: torch.zeros_like(low, dtype=torch.float64)

    def loss(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
        edges = _linear(low.double(), high.double(), _LINEAR_BINS + 1)
        below = histogram.mass_below(edges)
        inside = below.diff(dim=-1)
        reference = inside.clone()
        reference[..., 0] += below[..., 0]
        reference[..., -1] += histogram.total - below[..., -1]
        steps = _steps((edges[..., 1:] + edges[..., :-1]) / 2, low, high, args)
        found = _kl(reference, _spread_evenly(inside, steps))
        return found.masked_fill(histogram.total == 0, 0)  # a group of zeros loses nothing

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
    # A group of zeros may have a scale that divides by zero.
    quantized = quantized.nan_to_num(0)
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


def _in_parts(loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], numbers: int) -> Loss:
    """Compute the same loss for a few candidates at a time."""
    at_once = max(1, _AT_ONCE // max(1, numbers))

    def in_parts(low: torch.Tensor, high: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
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
