"""Range search: find the part of the observed range that loses least when it is quantized."""

from dataclasses import dataclass

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy
from compressed_tensors.quantization.lifecycle import fake_quantize

from inlay.ranges.args import format_key_of
from inlay.ranges.candidates import (
    Range,
    args_of_search,
    as_factors,
    candidates,
    error_dtype,
    errors_of,
    first_best,
    full_range,
    improving,
    is_traced,
    select,
    tried_of,
)
from inlay.ranges.estimates import best_candidate, can_be_estimated, estimate
from inlay.ranges.kernels import as_rows, chunks_of, kernel_of
from inlay.ranges.padding import as_weights, fill_invalid
from inlay.ranges.qparams import qparams_of_range
from inlay.ranges.rounding import stored

__all__ = ["COMPILE_FROM", "RangeSearch", "differences"]

# Number of elements from which an eager search is compiled, once per format. Only the size decides,
# so that results do not depend on the order of weights. Compiling pays off after 30 to 140 weights
# of this size, depending on the format (`make bench` measures it), and a model with such weights
# has that many. For smaller weights, compiling would take longer than searching.
COMPILE_FROM = 2**21


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
        self,
        observed: torch.Tensor,
        importance: torch.Tensor | None = None,
        *,
        compiled: bool | None = None,
    ) -> Range:
        """Find the range of each group.

        :param observed: values of shape (num_observations, *qparam_shape, group_size)
        :param importance: weight of each value's error, broadcastable to `observed`
        :param compiled: whether to use a compiled kernel; None leaves it to the size
        :return: minimum and maximum of the best range, each of shape qparam_shape
        """
        if not self.shrinks:
            return full_range(observed, self.expand)
        if is_traced(observed.detach()):
            return self.expression(observed, importance)
        found = None
        if observed.numel() >= COMPILE_FROM if compiled is None else compiled:
            found = self._compiled(observed, importance)
        elif importance is None:
            found = self._estimated(observed)
        return self.specification(observed, importance) if found is None else found

    @torch.no_grad()
    def among(self, observed: torch.Tensor, valid: torch.Tensor) -> Range:
        """Find the range of each group from valid observations only.

        :param valid: of shape (num_observations,), at least one of them true
        """
        if not is_traced(observed.detach()):
            return self(observed[valid])  # a graph has to keep the shape, and weighs with 0
        return self(fill_invalid(observed, valid), as_weights(valid, observed))

    @torch.no_grad()
    def each(self, observed: torch.Tensor, importance: torch.Tensor | None = None) -> Range:
        """Find the ranges of several tensors, compiled if they are large together.

        :param observed: of shape (tensors, *qparam_shape, group_size): one observation of each
        :param importance: weight of each value's error, broadcastable to `observed`
        :return: minimum and maximum of the best range, each of shape (tensors, *qparam_shape)
        """
        compiled = observed.numel() >= COMPILE_FROM and observed.ndim >= 4
        weights = None if importance is None else importance.expand(observed.shape)
        found = [
            self(
                observed[one : one + 1],
                None if weights is None else weights[one : one + 1],
                compiled=compiled,
            )
            for one in range(len(observed))
        ]
        lows, highs = zip(*found, strict=True)
        return torch.stack(lows), torch.stack(highs)

    @torch.no_grad()
    def specification(
        self, observed: torch.Tensor, importance: torch.Tensor | None = None
    ) -> Range:
        """Search as defined: try one candidate after another until patience runs out."""
        min_vals = torch.amin(observed, dim=(0, -1)) * self.expand
        max_vals = torch.amax(observed, dim=(0, -1)) * self.expand
        best_min, best_max = min_vals, max_vals
        best_error = torch.full_like(min_vals, torch.inf, dtype=error_dtype(observed))
        without_gain = 0

        for shrink in self.shrinks:
            low, high = min_vals * shrink, max_vals * shrink
            error = self.error(observed, low, high, importance)
            better = error < best_error
            best_error = torch.where(better, error, best_error)
            best_min = torch.where(better, low, best_min)
            best_max = torch.where(better, high, best_max)
            without_gain = 0 if bool(better.any()) else without_gain + 1
            if self.patience is not None and without_gain >= self.patience:
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
        """Compute the metric: the sum over each group of |quantized - observed| ** norm.

        Differences of half-precision values are taken and summed in float32. For tensor_group the
        local scale is not rounded, because the global scale that governs it is known only after
        all ranges of the fused layers have been chosen.
        """
        args = args_of_search(self.args)
        scale, zero_point = qparams_of_range(min_vals, max_vals, args)
        error = differences(observed, scale, zero_point, args).pow_(self.norm)
        if importance is not None:
            error.mul_(importance)
        return error.sum(dim=(0, -1))

    @torch.no_grad()
    def expression(self, observed: torch.Tensor, importance: torch.Tensor | None = None) -> Range:
        """Search without branching on data, for tracing; uncompiled, it holds every candidate.

        Patience is replayed from the errors of all candidates.
        """
        # Keep Inductor from computing the value again for every candidate.
        observed = stored(observed)
        shrinks = as_factors(self.shrinks, observed)
        low, high = full_range(observed, self.expand)
        errors = errors_of(
            observed,
            candidates(low, high, shrinks, args_of_search(self.args)),
            importance,
            args=self.args,
            norm=self.norm,
            dtype=observed.dtype,
        )
        return select(low, high, shrinks, self._best(errors))

    def _best(self, errors: torch.Tensor) -> torch.Tensor:
        """Find the best of the candidates that are tried before patience runs out."""
        tried = tried_of(improving(errors), self.patience)
        return first_best(torch.where(tried, errors, torch.inf))

    def _estimated(self, observed: torch.Tensor) -> Range | None:
        """Search a single group from bounds of errors; None if they cannot be computed."""
        if not can_be_estimated(observed, self.args, self.norm, len(self.shrinks)):
            return None
        low, high = full_range(observed, self.expand)
        factors = as_factors(self.shrinks, observed)
        qparams = qparams_of_range(low * factors, high * factors, self.args)
        scales, zero_points = (each.flatten().tolist() for each in qparams)
        largest = max(-float(low), float(high)) / self.expand

        def tried(index: int) -> Range:
            return low * self.shrinks[index], high * self.shrinks[index]

        best = best_candidate(
            estimate(observed, largest, scales, zero_points, self.args, self.norm),
            self.patience,
            error=lambda index: float(self.error(observed, *tried(index))),
        )
        return (low, high) if best is None else tried(best)

    def _compiled(self, observed: torch.Tensor, importance: torch.Tensor | None) -> Range | None:
        """Search with a compiled kernel, over chunks of rows; None if compilation is off."""
        rows = as_rows(observed)
        weights = None if importance is None else as_rows(importance.expand(observed.shape))
        kernel = kernel_of(
            format_key_of(self.args),
            self.norm,
            self.expand,
            observed.dtype,
            observed.device,
            weighted=importance is not None,
            single=len(rows) == 1,
        )
        shrinks = as_factors(self.shrinks, observed)
        # All rows together decide when patience runs out, so errors are kept if it may.
        tries_all = self.patience is None or self.patience >= len(self.shrinks)
        found = []
        for chunk, weight in chunks_of(rows, weights, len(self.shrinks)):
            result = kernel(chunk, shrinks, *weight)
            if result is None:
                return None
            low, high, errors = result
            found.append((low, high, first_best(errors), errors[:0] if tries_all else errors))
        low, high, best, errors = (torch.cat(parts) for parts in zip(*found, strict=True))
        if not tries_all and _may_stop_early(best, len(self.shrinks), self.patience):
            best = self._best(errors)
        low, high = select(low, high, shrinks, best)
        return low.reshape(observed.shape[1:-1]), high.reshape(observed.shape[1:-1])


def differences(
    observed: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor,
    args: QuantizationArgs,
    *,
    absolute: bool = True,
) -> torch.Tensor:
    """Compute |quantized - observed| in a new tensor, with one scale for the last dimension.

    :param absolute: False for the differences with their signs
    """
    # One scale per row of the last dimension replaces any strategy, so the value need not be
    # brought back to the shape it had before it was flattened.
    per_row = args.model_copy(update={"strategy": QuantizationStrategy.TOKEN})
    # Symmetric formats have zero points of 0; leaving them out saves an addition and a subtraction.
    offset = None if args.symmetric else zero_point.unsqueeze(-1)
    quantized = fake_quantize(observed, scale.unsqueeze(-1), offset, per_row).to(observed.dtype)
    difference: torch.Tensor = quantized.to(error_dtype(observed)).sub_(observed)
    return difference.abs_() if absolute else difference


def _may_stop_early(best: torch.Tensor, candidates: int, patience: int | None) -> bool:
    """Tell whether patience may have run out before the last candidate best for some group.

    The best candidate of a group improved it. So patience held out if there are no long gaps
    between candidates that are best for some group, which mostly settles the question.
    """
    bests = torch.bincount(best.flatten() + 1, minlength=candidates + 1)[1:] > 0
    return bool((bests & ~tried_of(bests, patience)).any())
