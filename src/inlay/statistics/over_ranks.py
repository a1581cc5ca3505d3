"""Statistics of all ranks as one."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial

import torch

from inlay.collectives import Entry, from_all_ranks, merge_now
from inlay.errors import StatisticsError
from inlay.recipe import Slot
from inlay.reductions import MAXIMUM, SUM, reduction_of
from inlay.statistics.value import Statistics

__all__ = ["agree_on_sharing", "merge_over_ranks"]

Sharing = tuple[str, ...]  # names of slots that always see the same values
_LAST_ONLY = "has statistics of its last batch only"


def merge_over_ranks(
    slots: Mapping[str, Slot], own: Mapping[str, Statistics], *, last_batch: int = 0
) -> dict[str, Statistics]:
    """Merge the statistics of every rank by slot.

    Every rank must call it with the same slots, also one that saw no data. Minima, maxima and sums
    are those of all the data. An average weighs each rank by the number of values that it saw; for
    moving averages, see `MovingAverage`. Statistics of the last batch only are those of the rank
    whose last batch came last.

    :param last_batch: the number of the last batch that this rank observed, among those of all
    :return: statistics of the slots that any rank has seen
    """
    current = {name: own[name].current() for name in slots if name in own}
    results = {name: _Merging(slot, current.get(name)) for name, slot in slots.items()}
    merge_now([entry for result in results.values() for entry in result.entries()])
    unmerged = {name: result for name, result in results.items() if result.has_last_only}
    if unmerged:
        _take_last(unmerged, last_batch)
    return {name: found for name, result in results.items() if (found := result.result())}


def _take_last(unmerged: Mapping[str, "_Merging"], last_batch: int) -> None:
    """Let all ranks have what the rank has whose last batch came last."""
    own = {name: result.last_only() for name, result in unmerged.items()}
    in_order = sorted(from_all_ranks((last_batch, own)), key=lambda of_rank: of_rank[0])
    for name, result in unmerged.items():
        result.take_last([found[name] for _, found in in_order if found[name]][-1])


def agree_on_sharing(own: Iterable[Sharing]) -> list[Sharing]:
    """Find the slots that share their values on every rank that has seen them.

    A rank that traced nothing knows of none. The result is the same on all ranks.
    """
    of_ranks = [
        {name: group for group in groups for name in group} for groups in from_all_ranks(tuple(own))
    ]
    groups = dict.fromkeys(group for known in of_ranks for group in known.values())
    return [
        group
        for group in groups
        if all(known.get(name, group) == group for known in of_ranks for name in group)
    ]


class _Merging:
    """The statistics of one slot while they are merged."""

    def __init__(self, slot: Slot, own: Statistics | None) -> None:
        self.slot = slot
        self.own = None if own is None or own.is_empty else own
        self._merged: dict[str, torch.Tensor] = {}

    def entries(self) -> list[Entry]:
        operations = self.slot.observer_class._act_sync_dict
        counts = {"seen": SUM, "tokens": SUM, _LAST_ONLY: MAXIMUM}
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
        if self.own is None:
            return None
        if name in ("seen", "tokens"):
            return self.own.seen if name == "seen" else self.own.tokens
        if name == _LAST_ONLY:
            return torch.ones(()) if self.last_only() else None
        return self.own.tensors.get(name)

    @property
    def has_last_only(self) -> bool:
        """Whether any rank has statistics that are not merged."""
        return _LAST_ONLY in self._merged

    def last_only(self) -> dict[str, torch.Tensor]:
        """The statistics of this rank's last batch that are not merged."""
        merged = self.slot.observer_class._act_sync_dict
        tensors = {} if self.own is None else self.own.tensors
        return {name: tensor.cpu() for name, tensor in tensors.items() if name not in merged}

    def take_last(self, found: Mapping[str, torch.Tensor]) -> None:
        """Take the statistics of a rank that are not merged in place of one's own."""
        own = {} if self.own is None else self.own.tensors
        for name, tensor in found.items():
            self._merged[name] = tensor.to(own[name].device) if name in own else tensor

    def result(self) -> Statistics | None:
        if "seen" not in self._merged:
            return None
        self._merged.pop(_LAST_ONLY, None)
        seen, tokens = self._merged.pop("seen"), self._merged.pop("tokens")
        if self.own is None:
            return Statistics(slot=self.slot, tensors=self._merged, seen=seen, tokens=tokens)
        if not self.own.is_complete:
            raise StatisticsError(
                f"{self.slot.name}: {self.slot.observer} keeps what it learns outside of tensors, "
                "which cannot be merged over ranks; keep it in tensors, or calibrate in one process"
            )
        tensors = {**self.own.tensors, **self._merged}
        return replace(self.own, tensors=tensors, seen=seen, tokens=tokens)
