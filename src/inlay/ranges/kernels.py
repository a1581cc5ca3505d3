"""Compile kernels that search ranges, one per format for tensors of every shape."""

import functools
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs

from inlay.ranges.candidates import (
    Candidates,
    args_of_search,
    as_factors,
    candidates,
    errors_of,
    full_range,
)
from inlay.torch_private import inductor_settings, trace_symbolically

__all__ = ["Chunk", "Kernel", "as_rows", "chunks_of", "keep_whole", "kernel_of"]

Kernel = Callable[..., Any]
# Rows, with their importance if there is any.
Chunk = tuple[torch.Tensor, tuple[torch.Tensor, ...]]

# Limits the chunks of rows given to a kernel: a chunk has at most this many pairs of candidate and
# group, and at most eight times as many elements, which may be held once more in float32.
_CHUNK = 2**21
# A range over the whole tensor is searched in pieces of about this size, so that a piece, like a
# group, stays in the cache while the candidates are tried.
_PIECE = 4096


def keep_whole() -> AbstractContextManager[None]:
    """Keep Inductor from storing intermediate results of a search.

    By default it stores the result of 50 operations, and of 30 on a GPU. A search of half-precision
    values has about 80, and the stored result would hold every candidate of every element.
    """
    return inductor_settings(realize_opcount_threshold=128)


def as_rows(observed: torch.Tensor) -> torch.Tensor:
    """View a tensor as (num_observations, rows, groups in a row, group_size)."""
    if math.prod(observed.shape[1:-1]) > 1:
        return observed.reshape(observed.shape[0], -1, *observed.shape[-2:])
    count = observed.numel()
    pieces = count // _PIECE
    # Real shapes have a divisor in this range. Without one, each observation is a piece.
    for size in range(_PIECE, _PIECE // 4, -1) if pieces > 1 else ():
        if count % size == 0:
            return observed.reshape(-1, 1, 1, size)
    return observed.reshape(observed.shape[0], 1, 1, -1)


def chunks_of(rows: torch.Tensor, weights: torch.Tensor | None, candidates: int) -> list[Chunk]:
    """Cut rows into chunks of nearly equal size, each with its importance if there is any."""
    numbers = rows.numel() // rows.shape[-1] * candidates
    count = min(rows.shape[1], -(-max(numbers, rows.numel() // 8) // _CHUNK))
    parts = rows.tensor_split(count, dim=1)
    if weights is None:
        return [(part, ()) for part in parts]
    return [(p, (w,)) for p, w in zip(parts, weights.tensor_split(count, dim=1), strict=True)]


@functools.lru_cache(maxsize=64)
def kernel_of(
    key: str,
    norm: float,
    expand: float,
    dtype: torch.dtype,
    device: torch.device,
    *,
    weighted: bool,
    single: bool,
) -> Kernel:
    """Compile a kernel that computes full ranges and candidate errors, for rows of every shape.

    The kernel takes rows, factors, and importance if it is `weighted`. It returns None if
    compilation is switched off.
    """
    args = QuantizationArgs.model_validate_json(key)
    half = dtype in (torch.bfloat16, torch.float16)

    def prepare(rows: torch.Tensor, shrinks: torch.Tensor) -> tuple[torch.Tensor, ...]:
        low, high = full_range(rows, expand)
        found = candidates(low, high, shrinks, args_of_search(args))
        # Loops over halves use vectors of two registers, which the compiler moves to memory.
        wide = rows.float() if half else rows
        return low, high, wide, *(part for part in found if part is not None)

    def errors(rows: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        parts = iter(rest)
        found = Candidates(
            scale=next(parts),
            inverse=None if half else next(parts),
            zero_point=None if args.symmetric else next(parts),
        )
        importance = next(parts, None)
        return errors_of(rows, found, importance, args=args, norm=norm, dtype=dtype)

    def search(rows: torch.Tensor, shrinks: torch.Tensor, *weights: torch.Tensor) -> Any:
        low, high, *prepared = prepare(rows, shrinks)
        return low, high, errors(*prepared, *weights)

    rows = torch.ones(1 if single else 2, 3, 5, 8, dtype=dtype, device=device)
    shrinks = as_factors((1.0,) * 7, rows)
    weights = (torch.ones(rows.shape, device=device),) if weighted else ()
    search(rows, shrinks, *weights)  # compressed-tensors caches its ranges, which must be real
    if not half:
        return _compile(search, rows, shrinks, *weights)
    # `prepare` rounds every step: it takes half a minute to compile and gets no faster.
    compiled = _compile(errors, *prepare(rows, shrinks)[2:], *weights)

    def prepare_and_search(rows: torch.Tensor, shrinks: torch.Tensor, *weights: Any) -> Any:
        low, high, *prepared = prepare(rows, shrinks)
        found = compiled(*prepared, *weights)
        return None if found is None else (low, high, found)

    return prepare_and_search


def _compile(function: Callable[..., Any], *example: torch.Tensor) -> Callable[..., Any]:
    """Compile a function for every shape; the result returns None if compilation is off.

    Trace compressed-tensors first, because Dynamo would stumble over it. The traced module also
    has its own code: Dynamo counts recompilations by code, and gives up on a function that all
    formats share.
    """
    traced = trace_symbolically(function, *example)
    with traced.graph.inserting_before(next(iter(traced.graph.nodes))):
        traced.graph.call_function(_require_compilation)
    traced.recompile()
    compiled = torch.compile(traced, dynamic=True)

    def run(*tensors: torch.Tensor) -> Any:
        try:
            with keep_whole():
                return compiled(*tensors)
        except _NotCompiledError:
            return None

    return run


class _NotCompiledError(RuntimeError):
    pass


def _require_compilation() -> None:
    """Refuse to run uncompiled, which would hold every candidate of every element."""
    if not torch.compiler.is_compiling():
        raise _NotCompiledError
