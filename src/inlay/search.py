"""Range search: which part of the observed range loses least when it is quantized?

The search tries the observed range, then ever smaller parts of it, and keeps for every group the
candidate with the smallest error. compressed-tensors computes the candidate's scale and the
quantized value, so what is minimized is the error that will really be made.
"""

from dataclasses import dataclass

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy
from compressed_tensors.quantization.lifecycle import fake_quantize
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from inlay.qparams import qparams_of_range

__all__ = ["RangeSearch"]


@dataclass(frozen=True, kw_only=True)
class RangeSearch:
    """A search over `shrinks`, the factors by which the observed range is multiplied in turn.

    :param args: how the observed value will be quantized
    :param shrinks: candidate factors, usually falling from 1
    :param norm: exponent of the error; 2 is the mean squared error
    :param patience: stop after this many candidates in a row that improved no group;
        None tries them all
    :param expand: factor applied to the observed range before the search
    """

    args: QuantizationArgs
    shrinks: tuple[float, ...]
    norm: float
    patience: int | None = None
    expand: float = 1.0

    @torch.no_grad()
    def __call__(
        self, observed: torch.Tensor, importance: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Find the range of each group.

        :param observed: values of shape (num_observations, *qparam_shape, group_size)
        :param importance: weight of each value's error, broadcastable to `observed`
        :return: minimum and maximum of the best range, each of shape qparam_shape
        """
        min_vals = torch.amin(observed, dim=(0, -1)) * self.expand
        max_vals = torch.amax(observed, dim=(0, -1)) * self.expand
        best_min, best_max = min_vals, max_vals
        best_error = torch.full_like(min_vals, torch.inf, dtype=_error_dtype(observed))
        without_gain = torch.zeros((), dtype=torch.int64, device=observed.device)
        stopped = torch.zeros((), dtype=torch.bool, device=observed.device)

        for shrink in self.shrinks:
            low, high = min_vals * shrink, max_vals * shrink
            error = self.error(observed, low, high, importance)
            better = (error < best_error) & ~stopped
            best_error = torch.where(better, error, best_error)
            best_min = torch.where(better, low, best_min)
            best_max = torch.where(better, high, best_max)
            if self.patience is not None:
                without_gain = torch.where(better.any(), 0, without_gain + 1)
                stopped = stopped | (without_gain >= self.patience)
                # The stop is replayed with tensors, so that tracing sees no branch. Leaving the
                # loop saves time where there is a value to look at and changes nothing else.
                if not _is_traced(stopped) and bool(stopped):
                    break

        return best_min, best_max

    @torch.no_grad()
    def error(
        self,
        observed: torch.Tensor,
        min_vals: torch.Tensor,
        max_vals: torch.Tensor,
        importance: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The metric: sum over each group of |quantized - observed| ** norm.

        Differences of half-precision values are taken and summed in float32. For tensor_group the
        rounding of the local scale is left out, because the global scale that governs it is known
        only after all ranges of the fused layers have been chosen.
        """
        args = self.args
        if args.strategy == QuantizationStrategy.TENSOR_GROUP:
            args = args.model_copy(update={"scale_dtype": None})
        scale, zero_point = qparams_of_range(min_vals, max_vals, args)
        # With one scale per row of the last dimension the value is quantized in place of any
        # strategy, without bringing it back to the shape it had before it was flattened.
        per_row = args.model_copy(update={"strategy": QuantizationStrategy.TOKEN})
        quantized = fake_quantize(
            observed, scale.unsqueeze(-1), zero_point.unsqueeze(-1), per_row
        ).to(observed.dtype)

        dtype = _error_dtype(observed)
        error: torch.Tensor = quantized.to(dtype).sub_(observed).abs_().pow_(self.norm)
        if importance is not None:
            error.mul_(importance)
        return error.sum(dim=(0, -1))


def _is_traced(tensor: torch.Tensor) -> bool:
    """Whether there is no value behind the tensor, or one that must not be looked at."""
    return (
        type(tensor) is not torch.Tensor
        or torch.compiler.is_compiling()
        or get_proxy_mode() is not None
    )


def _error_dtype(observed: torch.Tensor) -> torch.dtype:
    return torch.promote_types(observed.dtype, torch.float32)
