"""Distributions of values, in as few bins as a picture needs."""

import math

import torch

from inlay.ranges.float_histogram import Histogram
from inlay.report.data import Distribution

__all__ = ["Clip", "distribution_of_histogram", "distribution_of_weight"]

Clip = tuple[float | None, float | None]

# Half of the bins divide what is left without so much at either end: the whole range may be
# hundreds of times wider, and all of the picture would be one bin.
_TAIL = 0.005
# Values of a weight that are looked at. The picture of all of them would be the same.
_SAMPLE = 1 << 16
_DIGITS = 6  # a picture shows fewer, and a report has many numbers


def distribution_of_histogram(histogram: Histogram, clip: Clip, *, bins: int) -> Distribution:
    """All that was counted, of all heads together.

    Zeros have a bin of their own without width: after an activation they may be half of all.
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
        at = min(max(0.0, low), high)  # what is next to zero counts as zero, on either side of it
        place = edges.index(at)
        edges.insert(place, at)
        counts.insert(place, zeros)
    return _distribution(edges, counts, clip)


def distribution_of_weight(weight: torch.Tensor, clip: Clip, *, bins: int) -> Distribution | None:
    """What a sample of the weight says of all of it, in even bins; None if it is not finite."""
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
    # With an edge at either limit, what is clipped can be told exactly.
    limits = [value for value in (0.0, *clip) if value is not None and low <= value <= high]
    return sorted({low, high, *torch.cat(parts).clamp(low, high).tolist(), *limits})


def _stride(weight: torch.Tensor) -> int:
    """A step through a weight that does not meet the same columns again and again."""
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
