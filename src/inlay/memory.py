"""What becomes of memory that is freed while a batch runs."""

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

__all__ = ["collecting_garbage_later", "keeping_freed_memory", "return_freed_memory"]

# Parameters of mallopt, from malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MiB = 1 << 20
# The largest that glibc raises its own thresholds to, by what a program frees.
_OWN = (64 * _MiB, 32 * _MiB)
_KEEPING = (2047 * _MiB, 1024 * _MiB)  # they are ints


@contextmanager
def keeping_freed_memory() -> Iterator[None]:
    """Let malloc hand out again what was freed, instead of returning it to the system.

    Op by op, a model makes and drops a tensor for every op. glibc returns the larger ones to the
    system and asks for them again, cleared, page by page: about a tenth of a forward on a CPU.
    Where there is no glibc, nothing is done.
    """
    _set_thresholds(*_KEEPING)
    try:
        yield
    finally:
        _set_thresholds(*_OWN)


def return_freed_memory() -> None:
    """Return to the system what was freed while it was kept."""
    if (glibc := _glibc()) is not None:
        glibc.malloc_trim(0)


@contextmanager
def collecting_garbage_later() -> Iterator[None]:
    """Leave garbage where it is for now.

    Tracing makes a hundred thousand objects, nearly all of which stay. Python would go through
    them again and again in search of garbage: a fifth of the time it takes to trace a model.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _set_thresholds(trim: int, mmap: int) -> None:
    if (glibc := _glibc()) is not None:
        glibc.mallopt(_M_TRIM_THRESHOLD, trim)
        glibc.mallopt(_M_MMAP_THRESHOLD, mmap)


@cache
def _glibc() -> Any | None:
    try:
        library = ctypes.CDLL(None)
    except (OSError, TypeError):  # TypeError on Windows
        return None
    return library if hasattr(library, "gnu_get_libc_version") else None
