"""Statistics of row groups, in tensors with a first dimension of groups."""

import itertools
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from inlay.recipe import Slot
from inlay.statistics.rule import Rule, TensorSpec
from inlay.statistics.value import Statistics

__all__ = ["GroupedStatistics"]


@dataclass(eq=False, kw_only=True)
class GroupedStatistics:
    """The statistics of a value whose rows stand in groups, each with slots of its own.

    A graph updates the tensors of all groups at once. The statistics of each group are views of
    them, so they are the same value as everywhere else: merged, stored and finalized like those of
    any other slot.

    :param of_group: the statistics of each group, in order
    :param tensors: those of all groups, by name
    :param seen: how many values each group has seen, int64 of shape (groups,)
    :param tokens: how many valid tokens each group has seen
    :param nothing: the tensors of a group that has seen nothing
    """

    of_group: Sequence[Statistics] = field(repr=False)
    tensors: Mapping[str, torch.Tensor] = field(repr=False)
    seen: torch.Tensor
    tokens: torch.Tensor
    nothing: Mapping[str, torch.Tensor] = field(repr=False)

    @classmethod
    def start(
        cls,
        rule: Rule,
        members: Sequence[Slot],
        specs: Sequence[TensorSpec] | None,
        device: torch.device,
    ) -> "GroupedStatistics":
        """Return the statistics of groups that have seen nothing.

        :param members: a slot for each group
        :param specs: shapes of the statistics of one; None if the observers keep them themselves
        """
        with torch.inference_mode(False):
            nothing = {} if specs is None else rule.start(tuple(specs))
            tensors = {
                name: tensor.expand(len(members), *tensor.shape).clone()
                for name, tensor in nothing.items()
            }
            seen, tokens = (
                torch.zeros(len(members), dtype=torch.int64, device=device) for _ in range(2)
            )
        of_group = [
            Statistics(
                slot=slot,
                tensors={name: tensor[number] for name, tensor in tensors.items()},
                seen=seen[number],
                tokens=tokens[number],
                live=slot.make_observer() if specs is None else None,
            )
            for number, slot in enumerate(members)
        ]
        return cls(
            of_group=of_group,
            tensors=tensors,
            seen=seen,
            tokens=tokens,
            nothing=nothing,
        )

    def rewound(self, before: Mapping[str, Statistics]) -> set[str]:
        """Return to a snapshot, if it has any group.

        Graphs that were there before go on with these tensors, so they are written to.

        :return: the names of the slots of groups; none if no group had seen anything
        """
        names = {one.slot.name for one in self.of_group}
        if not names & before.keys():
            return set()
        zero = torch.zeros((), dtype=torch.int64)
        for one in self.of_group:
            empty = Statistics(slot=one.slot, tensors=self.nothing, seen=zero, tokens=zero)
            if one.live is not None and one.slot.name not in before:
                one.live = one.slot.make_observer()
            one.restore(before.get(one.slot.name, empty))
        return names

    @cached_property
    def handle(self) -> int:
        """The number by which a graph finds statistics that it does not update itself."""
        number = next(_HANDLES)
        _BY_HANDLE[number] = self
        return number

    @staticmethod
    def of_handle(handle: int) -> "GroupedStatistics":
        return _BY_HANDLE[handle]

    def inputs(self) -> dict[str, torch.Tensor]:
        """Return what an observe node takes after the value, by name."""
        counts = {"seen": self.seen, "tokens": self.tokens}
        one = self.of_group[0]
        if one.live is None and one.rule.measures_row_groups:  # the graph updates them itself
            return {**counts, **self.tensors}
        return {**counts, "handle": torch.tensor(self.handle)}


_HANDLES = itertools.count()
_BY_HANDLE: "weakref.WeakValueDictionary[int, GroupedStatistics]" = weakref.WeakValueDictionary()
