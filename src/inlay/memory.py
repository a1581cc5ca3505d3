"""What becomes of memory that is freed while a batch runs."""

import ctypes
import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

__all__ = [
    "collecting_garbage_later",
    "keeping_freed_memory",
    "return_freed_memory",
    "returning_freed_memory",
]

# Parameters of mallopt, from malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MiB = 1 << 20
# Glibc raises its thresholds by what a program frees, to these at most. Nobody can read where they
# are, and once they are set they stay, so this is how malloc is left in the end.
_AFTERWARDS = (64 * _MiB, 32 * _MiB)
_RETURNING = (128 << 10, 128 << 10)  # what glibc begins with
_KEEPING = (2047 * _MiB, 1024 * _MiB)  # they are ints

# The thresholds of all that run now, in any thread. Malloc has one pair: those of the latest.
_running: list[tuple[object, tuple[int, int]]] = []
_lock = threading.Lock()


@contextmanager
def keeping_freed_memory() -> Iterator[None]:
    """Let malloc hand out again what was freed, instead of returning it to the system.

    An eager model makes and drops a tensor for every op. Glibc returns the larger ones to the
    system and asks for them again, cleared, page by page: about a tenth of a forward on a CPU.

    The setting is of the whole process. On exit it becomes what it was before if that was another
    call here. Otherwise malloc keeps at most 64 MiB and maps blocks of 32 MiB and more, the largest
    thresholds that glibc takes by itself. Malloc is left alone where there is no glibc, and where
    the user's environment sets its thresholds.
    """
    with _thresholds(_KEEPING):
        yield


@contextmanager
def returning_freed_memory() -> Iterator[None]:
    """Have malloc return freed memory at once; afterwards as for `keeping_freed_memory`."""
    return_freed_memory()
    with _thresholds(_RETURNING):
        yield


def return_freed_memory() -> None:
    """Return to the system what was freed while it was kept."""
    if (glibc := _glibc()) is not None:
        glibc.malloc_trim(0)


@contextmanager
def collecting_garbage_later() -> Iterator[None]:
    """Leave garbage where it is for now.

    Tracing makes a hundred thousand objects, and nearly all stay. Python would go through
    them again and again in search of garbage: a fifth of the time it takes to trace a model.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def _thresholds(wanted: tuple[int, int]) -> Iterator[None]:
    own = object(), wanted
    with _lock:
        _running.append(own)
        _set_thresholds()
    try:
        yield
    finally:
        with _lock:
            _running.remove(own)
            _set_thresholds()


def _set_thresholds() -> None:
    glibc = _glibc()
    if glibc is None or _are_set_by_user():
        return
    trim, mmap = _running[-1][1] if _running else _AFTERWARDS
    glibc.mallopt(_M_TRIM_THRESHOLD, trim)
    glibc.mallopt(_M_MMAP_THRESHOLD, mmap)


def _are_set_by_user() -> bool:
    by_name = any(f"MALLOC_{name}_THRESHOLD_" in os.environ for name in ("TRIM", "MMAP"))
    return by_name or "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", "")


@cache
def _glibc() -> Any | None:
    try:
        library = ctypes.CDLL(None)
    except (OSError, TypeError):  # TypeError on Windows
        return None
    return library if hasattr(library, "gnu_get_libc_version") else None
