"""Distributions of values, in as few bins as a chart needs."""

import math

import torch

from inlay.ranges.float_histogram import Histogram
from inlay.report.data import Distribution

__all__ = ["Clip", "distribution_of_histogram", "distribution_of_weight"]

Clip = tuple[float | None, float | None]

# Half of the bins divide the range without this share of values at either end. The whole range may
# be hundreds of times wider, and evenly divided it would show a single bin.
_TAIL = 0.005
# How many values of a weight are sampled. The chart of all of them would look the same.
_SAMPLE = 1 << 16
_DIGITS = 6  # a chart shows fewer, and a report has many numbers


def distribution_of_histogram(histogram: Histogram, clip: Clip, *, bins: int) -> Distribution:
    """Turn a histogram into a distribution of all heads together.

    Zeros get a bin of their own without width: after an activation they may be half of all values.
    """
    low, high = float(histogram.min_vals.min()), float(histogram.max_vals.max())
    total = float(histogram.total.sum())
    zeros = float(histogram.counts[..., [0, histogram.bins.per_sign]].sum())
    if low == high or zeros == total:
        return _distribution([low, high], [total], clip)
    edges = _edges(histogram, low, high, clip, bins)
    values = torch.tensor(edges, dtype=torch.float64, device=histogram.mass.device)
    rest = histogram.without_zeros() if zeros else histogram
    below = rest.mass_below(values.expand(*rest.mass.shape[:-1], -1)).flatten(0, -2).sum(0)
    below[0], below[-1] = 0, total - zeros
    counts = below.diff().tolist()
    if zeros:
        at = min(max(0.0, low), high)  # values next to zero, on either side, count as zero
        place = edges.index(at)
        edges.insert(place, at)
        counts.insert(place, zeros)
    return _distribution(edges, counts, clip)


def distribution_of_weight(weight: torch.Tensor, clip: Clip, *, bins: int) -> Distribution | None:
    """Estimate the distribution of a weight from a sample, in even bins; None if not finite."""
    low, high = (float(value) for value in weight.aminmax())
    if not (math.isfinite(low) and math.isfinite(high)):
        return None
    if low == high:
        return _distribution([low, high], [weight.numel()], clip)
    sample = weight.detach().flatten()[:: _stride(weight)].float().cpu()
    counts = torch.histc(sample, bins, min=low, max=high).double()
    counts *= weight.numel() / max(1.0, float(counts.sum()))
    edges = torch.linspace(low, high, bins + 1, dtype=torch.float64)
    return _distribution(edges.tolist(), counts.tolist(), clip)


def _edges(histogram: Histogram, low: float, high: float, clip: Clip, bins: int) -> list[float]:
    bulk = histogram.quantile(_TAIL).min(), histogram.quantile(1 - _TAIL).max()
    parts = [
        torch.linspace(float(start), float(end), bins // 2, dtype=torch.float64)
        for start, end in ((low, high), bulk)
    ]
    # Edges at the limits let a reader tell exactly how much is clipped.
    limits = [value for value in (0.0, *clip) if value is not None and low <= value <= high]
    return sorted({low, high, *torch.cat(parts).clamp(low, high).tolist(), *limits})


def _stride(weight: torch.Tensor) -> int:
    """Return a step through a weight that does not visit the same columns again and again."""
    step = max(1, weight.numel() // _SAMPLE)
    while math.gcd(step, weight.size(-1)) > 1:
        step += 1
    return step


def _distribution(edges: list[float], counts: list[float], clip: Clip) -> Distribution:
    return Distribution(
        edges=tuple(_rounded(edge) for edge in edges),
        counts=tuple(float(round(count)) for count in counts),
        clip_low=clip[0],
        clip_high=clip[1],
    )


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
