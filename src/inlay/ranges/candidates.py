"""Evaluate all candidates of a range search in one expression, and choose among them."""

import contextlib
from typing import NamedTuple

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy

from inlay.ranges.powers import absolute_power
from inlay.ranges.qparams import qparams_of_range
from inlay.ranges.rounding import EagerRounding, as_rounded, quantize_dequantize, stored
from inlay.torch_private import is_proxied

__all__ = [
    "Candidates",
    "Range",
    "args_of_search",
    "as_factors",
    "candidates",
    "error_dtype",
    "errors_of",
    "first_best",
    "full_range",
    "improving",
    "is_traced",
    "select",
    "times",
    "tried_of",
]

Range = tuple[torch.Tensor, torch.Tensor]


class Candidates(NamedTuple):
    """Qparams of all candidates of each group, of shape (*qparam_shape, candidates, 1)."""

    scale: torch.Tensor
    # Multiplying is three times as fast as dividing. The results differ only where a value lies
    # halfway between two numbers of the format, and either number is as good. None for half
    # precision, which divides because the quotient is rounded first.
    inverse: torch.Tensor | None
    zero_point: torch.Tensor | None


def errors_of(
    observed: torch.Tensor,
    candidates: Candidates,
    importance: torch.Tensor | None,
    *,
    args: QuantizationArgs,
    norm: float,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Compute the errors of all candidates, along the last dimension.

    :param dtype: dtype of the values before they were widened
    """
    wide = observed.to(error_dtype(observed)).unsqueeze(-2)
    scale, inverse, zero_point = candidates
    quantized = quantize_dequantize(wide, scale, zero_point, args, dtype, inverse=inverse)
    error = absolute_power(quantized - wide, norm)
    if importance is not None:
        error = error * importance.unsqueeze(-2)
    # Sum each observation by itself, so that the number of threads does not decide how a long sum
    # is divided. Add up the many sums in float64, which keeps small differences between candidates.
    errors = error.sum(-1)
    one = observed.shape[0] == 1
    errors = errors.squeeze(0) if one else errors.sum(0, dtype=torch.float64).to(wide.dtype)
    return torch.where(errors < torch.inf, errors, torch.inf)


def full_range(observed: torch.Tensor, expand: float) -> Range:
    return (
        times(torch.amin(observed, dim=(0, -1)), expand),
        times(torch.amax(observed, dim=(0, -1)), expand),
    )


def candidates(
    low: torch.Tensor, high: torch.Tensor, shrinks: torch.Tensor, args: QuantizationArgs
) -> Candidates:
    """Compute the qparams of all candidates, shaped to broadcast over the elements of groups."""
    dtype = error_dtype(low)
    with EagerRounding() if is_traced(low) else contextlib.nullcontext():
        lows, highs = (times(end.unsqueeze(-1), shrinks) for end in (low, high))
        scale, zero_point = qparams_of_range(lows, highs, args)
    scale = scale.to(dtype)
    return Candidates(
        scale=stored(scale).unsqueeze(-1),
        inverse=stored(1 / scale).unsqueeze(-1) if low.dtype == dtype else None,
        zero_point=None if args.symmetric else stored(zero_point.to(dtype)).unsqueeze(-1),
    )


def times(value: torch.Tensor, factor: torch.Tensor | float) -> torch.Tensor:
    """Multiply, rounding to the dtype of the value as eager PyTorch does for a plain number."""
    wide = value.to(error_dtype(value)) * factor
    return as_rounded(wide, value.dtype).to(value.dtype)


def improving(errors: torch.Tensor) -> torch.Tensor:
    """Mark the candidates that are better for some group than all candidates before them."""
    best_so_far = errors.cummin(-1).values
    best_before = torch.nn.functional.pad(best_so_far[..., :-1], (1, 0), value=torch.inf)
    return (errors < best_before).flatten(0, -2).any(0)


def tried_of(improving: torch.Tensor, patience: int | None) -> torch.Tensor:
    """Mark the candidates that are tried before patience runs out."""
    order = torch.arange(improving.shape[0], device=improving.device)
    if patience is None:
        return order >= 0
    until = order <= order.unsqueeze(-1)
    last_gain = torch.where(until & improving, order, -1).amax(-1)
    stops = order - last_gain >= patience
    return ~((order < order.unsqueeze(-1)) & stops).any(-1)


def first_best(errors: torch.Tensor) -> torch.Tensor:
    """Find the first of the best candidates of each group, or -1 where no error is finite."""
    least, best = errors.min(-1)
    return torch.where(least < torch.inf, best, -1)


def select(
    low: torch.Tensor, high: torch.Tensor, shrinks: torch.Tensor, best: torch.Tensor
) -> Range:
    """Return the range of the best candidate, or the full range where `best` is -1."""
    factor = torch.where(best < 0, 1.0, shrinks[best.clamp(min=0)])
    return times(low, factor), times(high, factor)


def args_of_search(args: QuantizationArgs) -> QuantizationArgs:
    if args.strategy == QuantizationStrategy.TENSOR_GROUP:
        return args.model_copy(update={"scale_dtype": None})
    return args


def as_factors(factors: tuple[float, ...], observed: torch.Tensor) -> torch.Tensor:
    return torch.tensor(factors, dtype=error_dtype(observed), device=observed.device)


def error_dtype(observed: torch.Tensor) -> torch.dtype:
    return torch.promote_types(observed.dtype, torch.float32)


def is_traced(tensor: torch.Tensor) -> bool:
    """Tell whether the tensor has no value, or one that must not be read."""
    return type(tensor) is not torch.Tensor or torch.compiler.is_compiling() or is_proxied()
