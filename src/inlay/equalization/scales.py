"""Scales of channels: how much of their size moves from a value into the weights that read it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from compressed_tensors.quantization import QuantizationArgs

from inlay.equalization.group import Group
from inlay.recipe import AUTO_STRENGTH, Strength

__all__ = ["Reader", "Scales", "at_least", "scales_of"]

# Channels that are smaller than this part of the largest one count as if they were so large.
_SMALLEST = 1e-5
# Strengths that "auto" chooses from. A stronger one makes all channels reach the range that was
# seen, so that new data is clipped where it goes a little further. The error below knows nothing of
# new data and asks for strong ones, so the headroom is here.
_CANDIDATES = (0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8)
# How much larger the largest value of a channel is taken to be than a typical one.
_CREST = 3.0
# Rows of a weight that the error is estimated from.
_ROWS = 64


@dataclass(frozen=True, kw_only=True)
class Reader:
    """A weight that reads a value, and how many steps it and its input have once quantized.

    :param weight_steps: None if the weight is not quantized
    :param input_steps: None if the input is not quantized
    :param weight_args: how the weight is quantized
    """

    weight: torch.Tensor
    weight_steps: int | None
    input_steps: int | None
    weight_args: QuantizationArgs | None = None


@dataclass(frozen=True, kw_only=True)
class Scales:
    """The scale of each channel of a group, and the strength that they come from."""

    values: torch.Tensor
    strength: float


@torch.no_grad()
def scales_of(
    group: Group,
    low: torch.Tensor,
    high: torch.Tensor,
    readers: Sequence[Reader],
    strength: Strength,
    *,
    means: torch.Tensor | None = None,
) -> Scales:
    """Compute the scales of a group from the ranges of its channels and the weights that read it.

    A channel that reaches `x`, read by weights that reach `w`, gets `x ** a / w ** (1 - a)`. With
    strength `a` = 1 all channels become equally large, with 0 all columns of the weights.

    :param means: how large the values of each channel are on average; if that is not known, they
        are taken to be a third of the largest
    """
    low, high = (value.to(torch.promote_types(value.dtype, torch.float32)) for value in (low, high))
    sizes = at_least(group.tie(torch.maximum(low.abs(), high.abs())))
    columns = [reader.weight.detach().abs().amax(0).to(sizes) for reader in readers]
    read = at_least(group.tie(torch.stack(columns).amax(0)))

    def scales(a: float) -> torch.Tensor:
        return sizes**a / read ** (1 - a)

    if strength != AUTO_STRENGTH:
        return Scales(values=scales(strength), strength=strength)
    typical = torch.maximum(low.abs(), high.abs()) / _CREST if means is None else means.to(sizes)
    errors = {a: _error(low, high, typical, readers, scales(a)) for a in _CANDIDATES}
    best = min(errors, key=lambda a: errors[a])
    return Scales(values=scales(best), strength=best)


def at_least(values: torch.Tensor) -> torch.Tensor:
    """Return sizes of channels without those that are next to nothing."""
    largest = values.amax()
    return values.clamp(min=float(largest) * _SMALLEST if largest > 0 else 1.0)


def _error(
    low: torch.Tensor,
    high: torch.Tensor,
    typical: torch.Tensor,
    readers: Sequence[Reader],
    scales: torch.Tensor,
) -> float:
    """Estimate the squared error of all outputs of a group.

    Rounding to steps of size d has an error of d²/12 on average. An input's error is read by every
    row of a weight; a row's error meets the input, channel by channel as large as it typically is.
    (Squares of a few huge values, such as those of a first token, would speak for all tokens.)
    """
    low, high = low / scales, high / scales
    span = float(high.amax().clamp(min=0) - low.amin().clamp(max=0))
    power = float((typical / scales).square().sum())
    total = 0.0
    for reader in readers:
        rows = reader.weight.detach()[:: max(1, len(reader.weight) // _ROWS)]
        weight = rows.to(scales) * scales
        error = 0.0
        if reader.input_steps is not None:
            error += (span / reader.input_steps) ** 2 * float(weight.square().sum())
        if reader.weight_steps is not None:
            steps = 2 * weight.abs().amax(1) / reader.weight_steps
            error += float(steps.square().sum()) * power
        total += error * len(reader.weight) / len(rows)
    return total
