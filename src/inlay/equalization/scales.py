"""Scales of channels: how much of their size moves from a value into the weights that read it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy

from inlay.equalization.group import Group
from inlay.formats.numbers import IntegerGrid, format_of
from inlay.recipe import AUTO_STRENGTH, Strength

__all__ = ["Channels", "Reader", "Scales", "scales_of"]

# A channel that contributes less than this part of what the largest one does is as good as silent.
_SILENT = 1e-6
# Strengths that "auto" chooses from. A stronger one makes all channels reach the range that was
# seen, so that new data is clipped where it goes a little further. The error below knows nothing of
# new data and asks for strong ones, so the headroom is here.
_CANDIDATES = (0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8)
# How much the mean size of a channel counts for "auto" beside the largest one. Few tokens decide
# what is largest, and other data has others; a fourth makes least of that.
_MEAN = 0.25
# Rows of a weight that the error is estimated from.
_ROWS = 64
# How much larger than the smallest an estimated error may be to count as equal.
_TIE = 1 + 1e-3


@dataclass(frozen=True, kw_only=True)
class Channels:
    """What was seen of each channel of a value: the ends of its range, and its mean size."""

    low: torch.Tensor
    high: torch.Tensor
    means: torch.Tensor

    @property
    def sizes(self) -> torch.Tensor:
        """How far each channel reaches from zero."""
        return torch.maximum(self.low.abs(), self.high.abs())

    def divided(self, scales: torch.Tensor) -> "Channels":
        """Return what would have been seen of the value with its channels divided by scales."""
        own = scales.to(self.low)
        return Channels(low=self.low / own, high=self.high / own, means=self.means / own)


@dataclass(frozen=True, kw_only=True)
class Reader:
    """A weight that reads a value, and how it and its input are quantized.

    :param weight_args: None if the weight is not quantized
    :param input_args: None if the input is not quantized
    """

    weight: torch.Tensor
    weight_args: QuantizationArgs | None
    input_args: QuantizationArgs | None


@dataclass(frozen=True, kw_only=True)
class Scales:
    """The scale of each channel of a group, and the strength that they come from."""

    values: torch.Tensor
    strength: float


@torch.no_grad()
def scales_of(
    group: Group, channels: Channels, readers: Sequence[Reader], strength: Strength
) -> Scales:
    """Compute the scales of a group from what its channels were, and the weights that read them."""
    # In float64, as a product of two small sizes may be nothing in float32.
    sizes, means = channels.sizes.to(torch.float64), channels.means.to(torch.float64)
    columns = [reader.weight.detach().abs().amax(0).to(sizes) for reader in readers]
    read = group.tie(torch.stack(columns).amax(0))
    if strength != AUTO_STRENGTH:
        return Scales(values=_scales(group.tie(sizes), read, strength), strength=strength)
    sizes = group.tie(sizes ** (1 - _MEAN) * means**_MEAN)
    tried = [Scales(values=_scales(sizes, read, a), strength=a) for a in _CANDIDATES]
    errors = [_error(channels, readers, each.values) for each in tried]
    # Of those that are as good, the weakest: the last bits of sums must not choose.
    good = (each for each, error in zip(tried, errors, strict=True) if error <= min(errors) * _TIE)
    return next(good, tried[0])


def _scales(sizes: torch.Tensor, read: torch.Tensor, a: float) -> torch.Tensor:
    """Return `x ** a / w ** (1 - a)` for channels that reach `x`, read by weights that reach `w`.

    Such channels reach `p ** (1 - a)` and are read by weights that reach `p ** a`, where `p` is
    `x * w`, which no scale changes. With strength `a` = 1 all channels become equally large, with
    0 all columns of the weights.

    A silent channel, whose `p` is next to nothing, has no say in what is computed, and its scale
    would be extreme: zero, if data never reached it. It gets the scale nearest to 1 with which
    neither it nor the weights that read it are larger than those of a channel that just counts.
    """
    product = sizes * read
    if not product.any():
        return torch.ones_like(product)
    product = product.clamp(min=float(product.amax()) * _SILENT)
    least, most = sizes / product ** (1 - a), product**a / read
    return torch.ones_like(product).clamp(min=least, max=most)


def _error(channels: Channels, readers: Sequence[Reader], scales: torch.Tensor) -> float:
    """Estimate the squared error of all outputs of a group.

    Rounding to steps of size d has an error of d²/12 on average. An input's error is read by every
    row of a weight; a row's error meets the input, channel by channel as large as it typically is.
    (Squares of a few huge values, such as those of a first token, would speak for all tokens.)
    """
    channels = channels.divided(scales)
    total = 0.0
    for reader in readers:
        rows = reader.weight.detach()[:: max(1, len(reader.weight) // _ROWS)]
        weight = rows.to(scales) * scales
        error = 0.0
        if reader.input_args is not None:
            error += _input_error(channels, weight, reader.input_args)
        if reader.weight_args is not None:
            error += _weight_error(channels, weight, reader.weight_args)
        total += error * len(reader.weight) / len(rows)
    return total


def _input_error(channels: Channels, weight: torch.Tensor, args: QuantizationArgs) -> float:
    """Sum d² over channels and the rows that read them, for the steps d of an input."""
    grid = format_of(args).grid
    if isinstance(grid, IntegerGrid):
        span = float(channels.high.amax().clamp(min=0) - channels.low.amin().clamp(max=0))
        return (span / grid.steps) ** 2 * float(weight.square().sum())
    scale = _largest_beside(channels.sizes, args) / grid.largest
    squared = grid.squared_steps(channels.means.to(weight), scale.to(weight))
    return float((squared * weight.square().sum(0)).sum())


def _weight_error(channels: Channels, weight: torch.Tensor, args: QuantizationArgs) -> float:
    """Sum d² over rows and channels of typical size, for the steps d of a weight."""
    grid = format_of(args).grid
    if isinstance(grid, IntegerGrid):
        steps = 2 * weight.abs().amax(1) / grid.steps
        return float(steps.square().sum()) * float(channels.means.square().sum())
    scale = _largest_beside(weight.abs(), args) / grid.largest
    squared = grid.squared_steps(weight, scale)
    return float((squared * channels.means.to(weight).square()).sum())


def _largest_beside(sizes: torch.Tensor, args: QuantizationArgs) -> torch.Tensor:
    """Return for each size the largest that shares a scale with it."""
    if args.strategy == QuantizationStrategy.TENSOR:
        return sizes.amax()
    if args.group_size is None or sizes.shape[-1] % args.group_size:
        return sizes.amax(-1, keepdim=True)
    groups = sizes.reshape(*sizes.shape[:-1], -1, args.group_size)
    return groups.amax(-1, keepdim=True).expand_as(groups).flatten(-2)
