"""Range search: find the part of the observed range that loses least when it is quantized.

The search tries the observed range, then ever smaller parts of it, and keeps for every group the
candidate with the smallest error. compressed-tensors computes each candidate's scale and defines
its quantized values, so the search minimizes the error that will really be made.

`RangeSearch.specification` defines the search, one candidate at a time. The same search is also
one expression over all candidates, which Inductor turns into one loop nest: a group is read from
memory once and stays in the cache while its candidates are tried. A traced graph contains the
expression itself; an eager observer compiles it once per format for weights of every shape. A
single group, such as an activation with one scale, is searched from estimates instead (`replay`).
"""

from collections.abc import Callable, Iterator
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
from inlay.ranges.kernels import Chunk, Kernel, as_rows, chunks_of, kernel_of
from inlay.ranges.padding import as_weights, fill_invalid
from inlay.ranges.qparams import qparams_of_range
from inlay.ranges.replay import (
    BinnedEstimate,
    Bounds,
    Estimate,
    best_candidate,
    can_be_binned,
    can_be_estimated,
)
from inlay.ranges.rounding import stored

__all__ = ["COMPILE_FROM", "RangeSearch", "differences"]

# Number of elements from which an eager search is compiled, once per format. Only the size decides,
# so that results do not depend on the order of weights. Compiling pays off after 30 to 140 weights
# of this size, depending on the format (`make bench` measures it), and a model with such weights
# has that many. For smaller weights, compiling would take longer than searching.
COMPILE_FROM = 2**21
# Number of elements whose errors are computed at once, uncompiled. More would not stay in the cache
# from one operation to the next, and memory for each result would be fetched from the system.
_IN_CACHE = 2**18


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
    def __call__(self, observed: torch.Tensor, importance: torch.Tensor | None = None) -> Range:
        """Find the range of each group.

        :param observed: values of shape (num_observations, *qparam_shape, group_size)
        :param importance: weight of each value's error, broadcastable to `observed`
        :return: minimum and maximum of the best range, each of shape qparam_shape
        """
        if not self.shrinks:
            return full_range(observed, self.expand)
        if is_traced(observed.detach()):
            return self.expression(observed, importance)
        if observed.numel() >= COMPILE_FROM:
            return self._compiled(observed, importance)
        if importance is None and can_be_estimated(observed, self.args):
            return self._replayed(observed)
        return self.specification(observed, importance)

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
        """Find the ranges of several tensors at once, each with a patience of its own.

        :param observed: of shape (tensors, *qparam_shape, group_size): one observation of each
        :param importance: weight of each value's error, broadcastable to `observed`
        :return: minimum and maximum of the best range, each of shape (tensors, *qparam_shape)
        """
        count, shape = len(observed), observed.shape[:-1]
        together = observed.flatten(0, 1).unsqueeze(0)
        weights = None
        if importance is not None:
            weights = importance.expand(observed.shape).flatten(0, 1).unsqueeze(0)
        if not self.shrinks:
            low, high = full_range(together, self.expand)
        elif together.numel() < COMPILE_FROM or observed.ndim < 4:
            low, high = self._specification(together, weights, count)
        else:
            low, high = self._compiled(together, weights, count)
        return low.reshape(shape), high.reshape(shape)

    @torch.no_grad()
    def specification(
        self, observed: torch.Tensor, importance: torch.Tensor | None = None
    ) -> Range:
        """Search as defined: try one candidate after another until patience runs out."""
        return self._specification(observed, importance, 1)

    def _specification(
        self, observed: torch.Tensor, importance: torch.Tensor | None, tensors: int
    ) -> Range:
        """Search as defined, for equal parts of the first dimension of qparams by themselves."""
        min_vals = torch.amin(observed, dim=(0, -1)) * self.expand
        max_vals = torch.amax(observed, dim=(0, -1)) * self.expand
        best_min, best_max = min_vals, max_vals
        best_error = torch.full_like(min_vals, torch.inf, dtype=error_dtype(observed))
        without_gain = torch.zeros(tensors, dtype=torch.int64, device=observed.device)
        left = None  # of which tensors patience has not run out, once it has of some

        for shrink in self.shrinks:
            low, high = min_vals * shrink, max_vals * shrink
            error = self.error(observed, low, high, importance)
            better = error < best_error
            if left is not None:
                better &= _beside(left, better)
            best_error = torch.where(better, error, best_error)
            best_min = torch.where(better, low, best_min)
            best_max = torch.where(better, high, best_max)
            gained = better.reshape(tensors, -1).any(1)
            without_gain = torch.where(gained, 0, without_gain + 1)
            if self.patience is not None and not bool(gained.all()):
                left = without_gain < self.patience
                if not bool(left.any()):
                    break

        return best_min, best_max

    def _replayed(self, observed: torch.Tensor) -> Range:
        """Search the range of a single group from estimates, with the result of the definition."""
        low, high = full_range(observed, self.expand)

        def tried(index: int) -> Range:
            return low * self.shrinks[index], high * self.shrinks[index]

        best = best_candidate(
            len(self.shrinks),
            self.patience,
            estimate=self._estimate(observed, low, high),
            error=lambda index: float(self.error(observed, *tried(index))),
        )
        return (low, high) if best is None else tried(best)

    def _estimate(
        self, observed: torch.Tensor, low: torch.Tensor, high: torch.Tensor
    ) -> Callable[[int], Bounds]:
        """Where the errors of candidates lie."""
        factors = as_factors(self.shrinks, observed)
        qparams = qparams_of_range(low * factors, high * factors, self.args)
        scales, zero_points = (each.flatten().tolist() for each in qparams)
        ends = float(low) / self.expand, float(high) / self.expand
        if can_be_binned(observed, self.norm, len(self.shrinks)):
            given = scales, zero_points
            return BinnedEstimate(observed, ends, given, self.shrinks, self.args, self.norm)
        largest = max(abs(end) for end in ends)
        estimate = Estimate(observed, largest, self.args, self.norm)
        return lambda index: estimate(scales[index], zero_points[index])

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
        parts = min(observed.shape[1], -(-observed.numel() // _IN_CACHE))
        if len(observed) > 1 or parts <= 1:
            return self._error(observed, min_vals, max_vals, importance)
        # A group is summed in the same order whatever other groups there are.
        rows = observed.tensor_split(parts, dim=1)
        ends = min_vals.tensor_split(parts), max_vals.tensor_split(parts)
        weights = (
            [None] * parts
            if importance is None
            else importance.expand(observed.shape).tensor_split(parts, dim=1)
        )
        return torch.cat([self._error(*part) for part in zip(rows, *ends, weights, strict=True)])

    def _error(
        self,
        observed: torch.Tensor,
        min_vals: torch.Tensor,
        max_vals: torch.Tensor,
        importance: torch.Tensor | None,
    ) -> torch.Tensor:
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
        tried = tried_of(improving(errors), self.patience)
        best = first_best(torch.where(tried, errors, torch.inf))
        return select(low, high, shrinks, best)

    def _compiled(
        self, observed: torch.Tensor, importance: torch.Tensor | None, tensors: int = 1
    ) -> Range:
        """Search with a compiled kernel, over chunks of rows.

        :param tensors: how many tensors there are along the first dimension of qparams; the rows
            of each share one decision to stop
        """
        rows = as_rows(observed)
        weights = None if importance is None else as_rows(importance.expand(observed.shape))
        chunks = chunks_of(rows, weights, len(self.shrinks))
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

        lows, highs, bests = [], [], []
        for chunk, weight in chunks:
            result = kernel(chunk, shrinks, *weight)
            if result is None:  # compilation is switched off
                return self._specification(observed, importance, tensors)
            low, high, errors = result
            lows.append(low)
            highs.append(high)
            bests.append(first_best(errors).to(torch.int16))  # small: one is kept for every group
        best = torch.cat(bests).long()
        early = [
            self.patience is not None and _stopped_early(own, len(shrinks), self.patience)
            for own in best.tensor_split(tensors)
        ]
        if tensors == 1 and early[0]:
            single = errors if len(chunks) == 1 else None
            best = self._within_patience(kernel, chunks, shrinks, single)
        low, high = select(torch.cat(lows), torch.cat(highs), shrinks, best)
        low, high = low.reshape(observed.shape[1:-1]), high.reshape(observed.shape[1:-1])
        if tensors > 1:
            self._search_again(early, observed, importance, (low, high))
        return low, high

    def _search_again(
        self,
        early: list[bool],
        observed: torch.Tensor,
        importance: torch.Tensor | None,
        found: Range,
    ) -> None:
        """Write the ranges of tensors for which patience may have run out, searched alone."""
        step = observed.shape[1] // len(early)
        for number in (number for number, is_early in enumerate(early) if is_early):
            rows = slice(number * step, (number + 1) * step)
            weights = None if importance is None else importance[:, rows]
            for whole, own in zip(found, self._compiled(observed[:, rows], weights), strict=True):
                whole[rows] = own

    def _within_patience(
        self,
        kernel: Kernel,
        chunks: list[Chunk],
        shrinks: torch.Tensor,
        single: torch.Tensor | None,
    ) -> torch.Tensor:
        """Find the best candidates among those tried before patience runs out.

        :param single: the errors, if there is a single chunk; those of several chunks are not kept
            but computed twice more
        """

        def errors() -> Iterator[torch.Tensor]:
            if single is not None:
                yield single
                return
            for chunk, weight in chunks:
                yield kernel(chunk, shrinks, *weight)[2]

        gained = torch.zeros(len(shrinks), dtype=torch.bool, device=shrinks.device)
        for part in errors():
            gained |= improving(part)
        tried = tried_of(gained, self.patience)
        return torch.cat([first_best(torch.where(tried, part, torch.inf)) for part in errors()])


def differences(
    observed: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor, args: QuantizationArgs
) -> torch.Tensor:
    """Compute |quantized - observed| in a new tensor, with one scale for the last dimension."""
    # One scale per row of the last dimension replaces any strategy, so the value need not be
    # brought back to the shape it had before it was flattened.
    per_row = args.model_copy(update={"strategy": QuantizationStrategy.TOKEN})
    # Symmetric formats have zero points of 0; leaving them out saves an addition and a subtraction.
    offset = None if args.symmetric else zero_point.unsqueeze(-1)
    quantized = fake_quantize(observed, scale.unsqueeze(-1), offset, per_row).to(observed.dtype)
    difference: torch.Tensor = quantized.to(error_dtype(observed)).sub_(observed).abs_()
    return difference


def _beside(flags: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """Repeat a flag of each tensor for all its groups, which are equal parts of the first ones."""
    of_rows = flags.repeat_interleave(groups.shape[0] // len(flags))
    return of_rows.reshape(-1, *[1] * (groups.ndim - 1))


def _stopped_early(best: torch.Tensor, candidates: int, patience: int) -> bool:
    """Tell whether patience may have run out before the last candidate best for some group.

    The best candidate of a group improved it. So patience held out if there are no long gaps
    between candidates that are best for some group, which mostly settles the question.
    """
    bests = torch.bincount(best.flatten() + 1, minlength=candidates + 1)[1:] > 0
    return bool((bests & ~tried_of(bests, patience)).any())
