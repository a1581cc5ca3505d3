"""Range search: which part of the observed range loses least when it is quantized?

The search tries the observed range, then ever smaller parts of it, and keeps for every group the
candidate with the smallest error. compressed-tensors computes the candidate's scale and says what
the quantized value is, so what is minimized is the error that will really be made.

`RangeSearch.specification` says what the search means, one candidate at a time. The same search is
also one expression over all candidates, which Inductor makes one loop nest of: a group is read
from memory once and stays in the cache while its candidates are tried. Traced into a graph it
stands there as it is; an eager observer compiles it once per format for weights of every shape.
"""

import contextlib
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy
from compressed_tensors.quantization.lifecycle import fake_quantize
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx

from inlay.powers import absolute_power
from inlay.qparams import qparams_of_range
from inlay.rounding import EagerRounding, as_rounded, quantize_dequantize

__all__ = ["COMPILE_FROM", "RangeSearch"]

# Elements from which an eager search is compiled. The kernel takes some 6 s to compile and then
# about 10 ns per element, against 100 ns for the eager search: on 2**20 elements it saves 0.1 s a
# tensor, so a model of some sixty weights of that size repays it. Smaller models would wait longer
# for the compiler than for the search.
COMPILE_FROM = 2**20

# Numbers per candidate and group that a kernel may hold at a time, and an eighth of the elements
# that may be held once more in float32: rows come in chunks that stay below.
_CHUNK = 2**21
# A range over the whole tensor is searched in pieces of about this size, one after another, for
# the same reason that groups are: a piece stays in the cache while the candidates are tried.
_PIECE = 4096

Range = tuple[torch.Tensor, torch.Tensor]


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
            return _full_range(observed, self.expand)
        if _is_traced(observed.detach()):
            return self._traced(observed, importance)
        if observed.numel() < COMPILE_FROM:
            return self.specification(observed, importance)
        return self._compiled(observed, importance)

    @torch.no_grad()
    def specification(
        self, observed: torch.Tensor, importance: torch.Tensor | None = None
    ) -> Range:
        """What the search means: one candidate after another, until patience runs out."""
        min_vals = torch.amin(observed, dim=(0, -1)) * self.expand
        max_vals = torch.amax(observed, dim=(0, -1)) * self.expand
        best_min, best_max = min_vals, max_vals
        best_error = torch.full_like(min_vals, torch.inf, dtype=_error_dtype(observed))
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
        """The metric: sum over each group of |quantized - observed| ** norm.

        Differences of half-precision values are taken and summed in float32. For tensor_group the
        rounding of the local scale is left out, because the global scale that governs it is known
        only after all ranges of the fused layers have been chosen.
        """
        args = _args_of_search(self.args)
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

    @torch.no_grad()
    def expression(self, observed: torch.Tensor, importance: torch.Tensor | None = None) -> Range:
        """The search without a branch on data, for tracing: run as it is, it holds every candidate.

        Patience is replayed from the errors of all candidates.
        """
        shrinks = _as_tensor(self.shrinks, observed)
        low, high = _full_range(observed, self.expand)
        scale, zero_point = _candidates(low, high, shrinks, _args_of_search(self.args))
        errors = _errors(
            observed,
            scale,
            zero_point,
            importance,
            args=self.args,
            norm=self.norm,
            dtype=observed.dtype,
        )
        tried = _tried(_improving(errors), self.patience)
        tried_errors = torch.where(tried, errors, torch.inf)
        best = torch.where(tried_errors.amin(-1) < torch.inf, tried_errors.argmin(-1), -1)
        return _select(low, high, shrinks, best)

    def _traced(self, observed: torch.Tensor, importance: torch.Tensor | None) -> Range:
        """The expression, once for a tensor that is searched in the same way again.

        An observer in a graph is traced for its first value and for later ones. Nothing after
        that would find out that both hold the same search. The tensor remembers it: while a graph
        is traced tensors do not change, and when it goes, so does what it remembers.
        """
        if importance is not None:
            return self.expression(observed, importance)
        known: dict[object, Range] = observed.__dict__.setdefault("_inlay_ranges", {})
        key = (_key(self.args), self.shrinks, self.norm, self.patience, self.expand)
        if key not in known:
            known[key] = self.expression(observed)
        return known[key]

    def _compiled(self, observed: torch.Tensor, importance: torch.Tensor | None) -> Range:
        """The search in a compiled kernel, over chunks of rows that share one decision to stop."""
        rows = _as_rows(observed)
        weights = None if importance is None else _as_rows(importance.expand(observed.shape))
        chunks = _chunks(rows, weights, len(self.shrinks))
        kernel = _kernel(
            _key(self.args),
            self.norm,
            self.expand,
            observed.dtype,
            weighted=importance is not None,
            single=len(rows) == 1,
        )
        shrinks = _as_tensor(self.shrinks, observed)

        found = []
        improving = torch.zeros(len(shrinks), dtype=torch.bool)
        for chunk, weight in chunks:
            result = kernel(chunk, shrinks, *weight)
            if result is None:  # compilation is switched off
                return self.specification(observed, importance)
            low, high, errors = result
            best, gains = _replay(errors)
            found.append((low, high, best))
            improving |= gains
        tried = int(_tried(improving, self.patience).sum())
        for place, (chunk, weight) in enumerate(chunks):
            low, high, best = found[place]
            # Rarely a group is best off with a candidate that was not tried any more.
            if bool((best >= tried).any()):
                again = kernel(chunk, shrinks, *weight)
                assert again is not None, "it was compiled a moment ago"
                best = _replay(again[2][..., :tried])[0]
            found[place] = (*_select(low, high, shrinks, best.reshape(low.shape).long()), best)
        low, high = (torch.cat([result[side] for result in found]) for side in (0, 1))
        return low.reshape(observed.shape[1:-1]), high.reshape(observed.shape[1:-1])


def _errors(
    observed: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    importance: torch.Tensor | None,
    *,
    args: QuantizationArgs,
    norm: float,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The errors of all candidates for values that came in `dtype`, in a last dimension."""
    wide = observed.to(_error_dtype(observed)).unsqueeze(-2)
    quantized = quantize_dequantize(wide, scale, zero_point, args, dtype)
    error = absolute_power(quantized - wide, norm)
    if importance is not None:
        error = error * importance.unsqueeze(-2)
    # Observation by observation, so that it does not depend on the number of threads how a long
    # sum is divided; what the many sums are added up in must not lose what tells them apart.
    errors = error.sum(-1)
    one = observed.shape[0] == 1
    errors = errors.squeeze(0) if one else errors.sum(0, dtype=torch.float64).to(wide.dtype)
    return torch.where(errors < torch.inf, errors, torch.inf)


def _full_range(observed: torch.Tensor, expand: float) -> Range:
    return (
        _times(torch.amin(observed, dim=(0, -1)), expand),
        _times(torch.amax(observed, dim=(0, -1)), expand),
    )


def _candidates(
    low: torch.Tensor, high: torch.Tensor, shrinks: torch.Tensor, args: QuantizationArgs
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scale and zero point of all candidates, ready to be used with the elements of the groups."""
    dtype = _error_dtype(low)
    with EagerRounding() if _is_traced(low) else contextlib.nullcontext():
        lows, highs = (_times(end.unsqueeze(-1), shrinks) for end in (low, high))
        scale, zero_point = qparams_of_range(lows, highs, args)
    scale = _stored(scale.to(dtype)).unsqueeze(-1)
    return scale, None if args.symmetric else _stored(zero_point.to(dtype)).unsqueeze(-1)


def _stored(value: torch.Tensor) -> torch.Tensor:
    """The same, stored in memory: else Inductor computes it again for every element that uses it.

    It does not look behind a tensor that is viewed with explicit strides.
    """
    return value.contiguous().as_strided(value.shape, value.contiguous().stride())


def _times(value: torch.Tensor, factor: torch.Tensor | float) -> torch.Tensor:
    """The product, rounded to the dtype of the value as eager PyTorch does for a plain number."""
    wide = value.to(_error_dtype(value)) * factor
    return as_rounded(wide, value.dtype).to(value.dtype)


def _improving(errors: torch.Tensor) -> torch.Tensor:
    """Which candidates are better for some group than all candidates before them."""
    order = torch.arange(errors.shape[-1], device=errors.device)
    earlier = order < order.unsqueeze(-1)
    best_before = torch.where(earlier, errors.unsqueeze(-2), torch.inf).amin(-1)
    return (errors < best_before).flatten(0, -2).any(0)


def _tried(improving: torch.Tensor, patience: int | None) -> torch.Tensor:
    """Which candidates are tried before patience runs out."""
    order = torch.arange(improving.shape[0], device=improving.device)
    if patience is None:
        return order >= 0
    until = order <= order.unsqueeze(-1)
    last_gain = torch.where(until & improving, order, -1).amax(-1)
    stops = order - last_gain >= patience
    return ~((order < order.unsqueeze(-1)) & stops).any(-1)


def _replay(errors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The first best candidate of each group, and which candidates improve some group."""
    columns = errors.flatten(0, -2).t().contiguous()
    best = torch.full_like(columns[0], -1, dtype=torch.int16)  # kept for every group
    best_error = torch.full_like(columns[0], torch.inf)
    gains = []
    for candidate, error in enumerate(columns):
        better = error < best_error
        gains.append(bool(better.any()))
        best.masked_fill_(better, candidate)
        torch.minimum(best_error, error, out=best_error)
    return best, torch.tensor(gains)


def _select(
    low: torch.Tensor, high: torch.Tensor, shrinks: torch.Tensor, best: torch.Tensor
) -> Range:
    """The range of the best candidate, or the full one where no error was finite: best is -1."""
    factor = torch.where(best < 0, 1.0, shrinks[best.clamp(min=0)])
    return _times(low, factor), _times(high, factor)


def _as_rows(observed: torch.Tensor) -> torch.Tensor:
    """View as (num_observations, rows, groups in a row, group_size)."""
    if math.prod(observed.shape[1:-1]) > 1:
        return observed.reshape(observed.shape[0], -1, *observed.shape[-2:])
    count = observed.numel()
    pieces = count // _PIECE
    # Real shapes have a divisor near; without one the pieces are what the observations are.
    for size in range(_PIECE, _PIECE // 4, -1) if pieces > 1 else ():
        if count % size == 0:
            return observed.reshape(-1, 1, 1, size)
    return observed.reshape(observed.shape[0], 1, 1, -1)


def _chunks(
    rows: torch.Tensor, weights: torch.Tensor | None, candidates: int
) -> list[tuple[torch.Tensor, tuple[torch.Tensor, ...]]]:
    """Cut into chunks of rows of nearly equal size, each with its importance if there is any."""
    numbers = rows.numel() // rows.shape[-1] * candidates
    count = min(rows.shape[1], -(-max(numbers, rows.numel() // 8) // _CHUNK))
    parts = rows.tensor_split(count, dim=1)
    if weights is None:
        return [(part, ()) for part in parts]
    return [(p, (w,)) for p, w in zip(parts, weights.tensor_split(count, dim=1), strict=True)]


@functools.lru_cache(maxsize=64)
def _kernel(
    key: str, norm: float, expand: float, dtype: torch.dtype, *, weighted: bool, single: bool
) -> Callable[..., tuple[torch.Tensor, ...] | None]:
    """A compiled kernel for rows of every shape: the full ranges and the errors of candidates.

    It takes rows, factors, and importance if it is `weighted`. Candidates of half-precision values
    are computed outside, where every step is rounded by itself.
    """
    args = QuantizationArgs.model_validate_json(key)
    half = dtype in (torch.bfloat16, torch.float16)

    def prepare(rows: torch.Tensor, shrinks: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        low, high = _full_range(rows, expand)
        return low, high, *_candidates(low, high, shrinks, _args_of_search(args))

    def errors(rows: torch.Tensor, scale: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        importance = rest[-1] if weighted else None
        zero_point = None if args.symmetric else rest[0]
        return _errors(rows, scale, zero_point, importance, args=args, norm=norm, dtype=dtype)

    def search(rows: torch.Tensor, shrinks: torch.Tensor, *weights: torch.Tensor) -> Any:
        low, high, *qparams = prepare(rows, shrinks)
        # Loops over halves take vectors of two registers, which the compiler does not keep there.
        wide = rows.float() if half else rows
        found = compute(wide, *(part for part in qparams if part is not None), *weights)
        return None if found is None else (low, high, found)

    rows = torch.ones(1 if single else 2, 3, 5, 8, dtype=dtype)
    shrinks = _as_tensor((1.0,) * 7, rows)
    weights = (torch.ones(rows.shape),) if weighted else ()
    compute: Callable[..., Any] = errors
    search(rows, shrinks, *weights)  # compressed-tensors remembers its ranges, and only real ones
    if half:
        qparams = [part for part in prepare(rows, shrinks)[2:] if part is not None]
        compute = _compile(errors, rows.float(), *qparams, *weights)
        return search
    return _compile(search, rows, shrinks, *weights)


def _compile(function: Callable[..., Any], *example: torch.Tensor) -> Callable[..., Any]:
    """Compile for tensors of every shape. What is returned gives None if compilation is off.

    compressed-tensors is traced before Dynamo sees it, which would stumble over it. The traced
    module has code of its own: Dynamo counts recompilations by code, and gives up on a function
    that all formats share.
    """
    traced = make_fx(function, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*example)
    with traced.graph.inserting_before(next(iter(traced.graph.nodes))):
        traced.graph.call_function(_require_compilation)
    traced.recompile()
    compiled = torch.compile(traced, dynamic=True)

    def run(*tensors: torch.Tensor) -> Any:
        try:
            return compiled(*tensors)
        except _NotCompiledError:
            return None

    return run


class _NotCompiledError(RuntimeError):
    pass


def _require_compilation() -> None:
    """Keep an expression from running as it is: it would hold every candidate of every element."""
    if not torch.compiler.is_compiling():
        raise _NotCompiledError


def _key(args: QuantizationArgs) -> str:
    """The arguments as far as they matter here, in a form that can be looked up."""
    return str(args.model_copy(update={"observer": None, "observer_kwargs": {}}).model_dump_json())


def _args_of_search(args: QuantizationArgs) -> QuantizationArgs:
    if args.strategy == QuantizationStrategy.TENSOR_GROUP:
        return args.model_copy(update={"scale_dtype": None})
    return args


def _as_tensor(factors: tuple[float, ...], observed: torch.Tensor) -> torch.Tensor:
    return torch.tensor(factors, dtype=_error_dtype(observed), device=observed.device)


def _is_traced(tensor: torch.Tensor) -> bool:
    """Whether there is no value behind the tensor, or one that must not be looked at."""
    return (
        type(tensor) is not torch.Tensor
        or torch.compiler.is_compiling()
        or get_proxy_mode() is not None
    )


def _error_dtype(observed: torch.Tensor) -> torch.dtype:
    return torch.promote_types(observed.dtype, torch.float32)
