"""Statistics of all ranks as one."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch

from inlay.collectives import Entry, have_ranks, start_merging
from inlay.errors import StatisticsError
from inlay.recipe import Slot
from inlay.reductions import SUM, reduction_of
from inlay.statistics.value import Statistics

__all__ = ["merge_over_ranks", "sum_over_ranks"]


def merge_over_ranks(
    slots: Mapping[str, Slot], own: Mapping[str, Statistics]
) -> dict[str, Statistics]:
    """Merge the statistics of every rank by slot.

    Every rank must call it with the same slots, also one that saw no data. Statistics of the last
    batch only are not merged: each rank keeps its own.

    :return: statistics of the slots that any rank has seen
    """
    current = {name: own[name].current() for name in slots if name in own}
    results = {name: _Merging(slot, current.get(name)) for name, slot in slots.items()}
    entries = [entry for result in results.values() for entry in result.entries()]
    for work in start_merging(entries):
        work.wait()
    return {name: found for name, result in results.items() if (found := result.result())}


def sum_over_ranks(counts: Mapping[str, int]) -> dict[str, int]:
    """Sum counts over all ranks; without a process group they stay as they are."""
    if not have_ranks():
        return dict(counts)
    summed: dict[str, torch.Tensor] = {}
    entries = [
        Entry(
            name=name,
            kind=name,
            reduction=SUM,
            value=torch.tensor(count),
            weight=1,
            deliver=partial(summed.__setitem__, name),
        )
        for name, count in counts.items()
    ]
    for work in start_merging(entries):
        work.wait()
    return {name: int(total) for name, total in summed.items()}


class _Merging:
    """The statistics of one slot while they are merged."""

    def __init__(self, slot: Slot, own: Statistics | None) -> None:
        self.slot, self.own = slot, own
        self._is_empty = own is None or own.is_empty
        self._merged: dict[str, torch.Tensor] = {}

    def entries(self) -> list[Entry]:
        operations = self.slot.observer_class._act_sync_dict
        counts = {"seen": SUM, "tokens": SUM}
        statistics = {
            name: reduction_of(operation, f"{self.slot.name}: {name}")
            for name, operation in operations.items()
        }
        return [
            Entry(
                name=f"{self.slot.name}.{name}",
                kind=f"{self.slot.name}.{name}",
                reduction=reduction,
                value=self._value(name),
                weight=0 if self.own is None else int(self.own.seen),
                deliver=partial(self._merged.__setitem__, name),
            )
            for name, reduction in (counts | statistics).items()
        ]

    def _value(self, name: str) -> torch.Tensor | None:
        if self._is_empty or self.own is None:
            return None
        if name in ("seen", "tokens"):
            return self.own.seen if name == "seen" else self.own.tokens
        return self.own.tensors.get(name)

    def result(self) -> Statistics | None:
        if "seen" not in self._merged:
            return None
        seen, tokens = self._merged.pop("seen"), self._merged.pop("tokens")
        if self.own is None:
            if not self._merged:  # the last batch of another rank, which stays there
                return None
            return Statistics(slot=self.slot, tensors=self._merged, seen=seen, tokens=tokens)
        if not self.own.is_complete:
            raise StatisticsError(
                f"{self.slot.name}: {self.slot.observer} keeps what it learns outside of tensors, "
                "which cannot be merged over ranks; keep it in tensors, or calibrate in one process"
            )
        tensors = {**self.own.tensors, **self._merged}
        return replace(self.own, tensors=tensors, seen=seen, tokens=tokens)
