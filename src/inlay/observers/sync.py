"""Merge the statistics of observers over ranks."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist

from inlay.collectives import Entry, have_ranks, start_merging
from inlay.reductions import SUM, reduction_of

if TYPE_CHECKING:
    from inlay.observers.base import Observer

__all__ = ["start_sync", "sync_observers"]


def sync_observers(observers: Iterable["Observer"]) -> None:
    """Merge the statistics of many observers over all ranks, and wait until it is done.

    Call it on every rank with the same observers in the same order. Without a process group it
    does nothing. Averages weigh each rank by the number of values it observed since the last call.
    """
    for work in start_sync(observers):
        work.wait()


def start_sync(observers: Iterable["Observer"]) -> list[dist.Work]:
    """Start merging; the statistics are merged once each handle has been waited for."""
    if not have_ranks():
        return []
    observers = list(observers)
    entries = [
        _entry(observer, name, operation)
        for observer in observers
        for name, operation in observer._act_sync_dict.items()
    ]
    handles = start_merging(entries)
    for observer in observers:
        observer._unsynced_observations = 0
    return handles


def _entry(observer: "Observer", name: str, operation: Any) -> Entry:
    reduction = reduction_of(operation, f"{observer.slot}: {name}")
    value = getattr(observer, name, None)
    value = value if isinstance(value, torch.Tensor) else None
    base = observer._synced.get(name) if reduction is SUM else None
    if value is not None and base is not None:
        value = value - base.to(value)  # do not count again what was merged before
    first_time = name not in observer._synced
    return Entry(
        name=f"{observer.slot}.{name}",
        kind=f"{type(observer).__name__}.{name}",
        reduction=reduction,
        value=value,
        # Statistics set without `forward` were never counted; count them once.
        weight=observer._unsynced_observations or int(first_time),
        deliver=_delivery(observer, name, base),
    )


def _delivery(
    observer: "Observer", name: str, base: torch.Tensor | None
) -> Callable[[torch.Tensor], None]:
    def deliver(merged: torch.Tensor) -> None:
        result = merged if base is None else merged + base.to(merged)
        setattr(observer, name, result)
        observer._synced[name] = result

    return deliver
