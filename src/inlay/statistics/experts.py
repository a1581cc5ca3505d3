"""The statistics of all experts of a layer, in tensors with a first dimension of experts."""

import itertools
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from inlay.recipe import Slot
from inlay.statistics.rule import Rule, TensorSpec
from inlay.statistics.value import Statistics

__all__ = ["ExpertStatistics"]


@dataclass(eq=False, kw_only=True)
class ExpertStatistics:
    """What the experts of a layer have seen of one value, each for itself.

    A graph updates the tensors of all experts at once. The statistics of each expert are views of
    them, so they are the same value as everywhere else: merged, stored and finalized like those of
    any other slot.

    :param slots: of the parameters that hold the experts, as a graph knows them
    :param of_expert: the statistics of each expert, in order
    :param tensors: of all experts, by name
    :param seen: how many values each expert has seen, int64 of shape (experts,)
    :param tokens: how many tokens each expert has seen, without padding
    :param nothing: the tensors of an expert that has seen nothing
    """

    rule: Rule
    slots: tuple[Slot, ...]
    of_expert: Sequence[Statistics] = field(repr=False)
    tensors: Mapping[str, torch.Tensor] = field(repr=False)
    seen: torch.Tensor
    tokens: torch.Tensor
    nothing: Mapping[str, torch.Tensor] = field(repr=False)

    @classmethod
    def start(
        cls,
        rule: Rule,
        slots: Sequence[Slot],
        members: Sequence[Slot],
        specs: Sequence[TensorSpec] | None,
        device: torch.device,
    ) -> "ExpertStatistics":
        """The statistics of experts that have seen nothing.

        :param members: a slot for each expert
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
        of_expert = [
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
            rule=rule,
            slots=tuple(slots),
            of_expert=of_expert,
            tensors=tensors,
            seen=seen,
            tokens=tokens,
            nothing=nothing,
        )

    def rewound(self, before: Mapping[str, Statistics]) -> set[str]:
        """Forget what was observed since a snapshot was taken, if any expert is in it.

        Graphs that were there before go on with these tensors, so they are written to.

        :return: the names of the slots of experts; none if no expert had seen anything
        """
        names = {one.slot.name for one in self.of_expert}
        if not names & before.keys():
            return set()
        zero = torch.zeros((), dtype=torch.int64)
        for one in self.of_expert:
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
    def of_handle(handle: int) -> "ExpertStatistics":
        return _BY_HANDLE[handle]

    def inputs(self, *, in_graph: bool) -> dict[str, torch.Tensor]:
        """What an observe node takes after the value, by name.

        :param in_graph: whether the graph itself updates the statistics
        """
        counts = {"seen": self.seen, "tokens": self.tokens}
        if in_graph:
            return {**counts, **self.tensors}
        return {**counts, "handle": torch.tensor(self.handle)}


_HANDLES = itertools.count()
_BY_HANDLE: "weakref.WeakValueDictionary[int, ExpertStatistics]" = weakref.WeakValueDictionary()
