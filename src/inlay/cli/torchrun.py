"""Commands on the processes that torchrun starts: they run as one, and end as one."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from inlay.ranks.together import EndedError, channel

__all__ = ["process_group", "started_by_torchrun"]

# torchrun sends SIGTERM to all processes when one has ended, and SIGKILL half a minute later.
_SEARCH = 12.0  # seconds to find out which
_SILENCE = 2.5  # seconds without a sign of life that tell
_PATIENCE = 6.0  # seconds to end in good order after that


def started_by_torchrun() -> bool:
    """Whether torchrun, or something that sets the same variables, started this process."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


@contextmanager
def process_group() -> Iterator[None]:
    """Join the processes that torchrun started, until a command ends.

    On accelerators they are joined by the backend made for these, such as nccl, if there is one for
    each process; else by gloo.
    """
    import torch
    from torch import distributed as dist

    if dist.is_initialized():
        yield
        return
    backend = "gloo"
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    local = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
    if accelerator is not None and local < torch.accelerator.device_count():
        torch.accelerator.set_device_index(local)
        backend = dist.get_default_backend_for_device(accelerator)
    dist.init_process_group(backend)
    own = channel()  # from here on the others know of this process
    with _told_of_sigterm():
        yield
    if own is not None:
        own.close()
    # Left as it is if the command failed: a group that lacks a process might wait for it.
    dist.destroy_process_group()


@contextmanager
def _told_of_sigterm() -> Iterator[None]:
    """Turn the signal by which torchrun ends a process into the error that another one had."""

    def explain(_number: int, _frame: Any) -> None:
        own = channel()
        if own is None:
            sys.exit(128 + signal.SIGTERM)
        if own.is_failing:
            return  # this process is ending already
        if own.ended is not None:
            raise EndedError(own.ended)
        own.ended = own.find_lost(_SEARCH, _SILENCE)
        if own.ended is None:
            sys.exit(128 + signal.SIGTERM)
        # It is raised at the next look at the others. Here it might be lost, as in a finalizer, so
        # it is raised here only if there is no such look for a while.
        _later(_PATIENCE, signal.raise_signal, signal.SIGTERM)
        _later(2 * _PATIENCE, _end, own.ended)

    before = signal.signal(signal.SIGTERM, explain)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _later(seconds: float, function: Callable[..., Any], argument: Any) -> None:
    timer = threading.Timer(seconds, function, [argument])
    timer.daemon = True
    timer.start()


def _end(error: Exception) -> None:
    sys.stderr.write(f"inlay: error: {error}\n")
    sys.stderr.flush()
    os._exit(1)
