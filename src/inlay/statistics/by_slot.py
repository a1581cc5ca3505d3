"""Statistics of all slots of a calibration, by slot."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from inlay.collectives import from_all_ranks, have_ranks
from inlay.errors import StatisticsError
from inlay.observers import Observer, QParamsDict
from inlay.recipe import Plan, Slot
from inlay.statistics.data_seen import DataSeen
from inlay.statistics.on_disk import problem_with
from inlay.statistics.over_ranks import agree_on_sharing, merge_over_ranks
from inlay.statistics.row_groups import GroupedStatistics
from inlay.statistics.rule import Rule, TensorSpec
from inlay.statistics.value import Statistics

__all__ = ["StatisticsBySlot"]


class StatisticsBySlot:
    """What the slots of a plan have seen, and the qparams once these are computed."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.qparams: dict[str, QParamsDict] | None = None
        self.accepted: frozenset[str] = frozenset()  # problems that `finalize` was told to accept
        # Slots that always see the same values have the same entry.
        self._own: dict[str, Statistics] = {}
        self._sharing: dict[str, tuple[Slot, ...]] = {}
        # Those of row groups, by the first slot that a graph knows them by.
        self._grouped: dict[str, GroupedStatistics] = {}
        # Those of an earlier run; what an entry starts with when a graph first asks for it.
        self._stored: dict[str, Statistics] = {}
        self._of_all_ranks: dict[str, Statistics] | None = None
        # What slots would have seen of values that equalization scales, once that is decided.
        self.rescaled: dict[str, Statistics] = {}
        # Modules that ran in a graph where no product with their weight was recognised.
        self.unrecognised: set[str] = set()
        self.data_seen = DataSeen()  # that of this rank; of all ranks once it is merged
        self.data_parts: tuple[DataSeen, ...] = ()  # that of each rank, once it is merged
        self.last_batch = 0  # the number of this rank's last batch, among those of all ranks
        self.is_second_run = False  # over the data, which then flows through equalized weights
        # Statistics of a whole stack, for slots that are to have these instead of their own.
        self.replaced: dict[str, Statistics] = {}

    @property
    def is_final(self) -> bool:
        return self.qparams is not None

    def entry(
        self,
        slots: Sequence[Slot],
        rule: Rule,
        specs: Sequence[TensorSpec] | None,
        device: torch.device,
    ) -> Statistics | GroupedStatistics:
        """Return the statistics that a graph updates for these slots, made when first asked for.

        :param specs: shapes of the statistics; None if the observer keeps them itself
        """
        if slots[0].module in self.plan.stacks:
            return self._grouped_entry(slots, rule, specs, device)
        name = slots[0].name
        known = next((self._own[slot.name] for slot in slots if slot.name in self._own), None)
        if known is None:
            known = Statistics.start(Rule(slots[0]), specs, device)
            if name in self._stored:
                known.restore(self._stored[name])
            self._own.update({slot.name: known for slot in slots})
            self._sharing.update({slot.name: tuple(slots) for slot in slots})
        shared = next(self._sharing[slot.name] for slot in slots if slot.name in self._sharing)
        if shared != tuple(slots):
            raise StatisticsError(
                f"one graph of the model observes {_names(shared)} as one value, another "
                f"{_names(slots)}; calibrate with passes without ShareObservers"
            )
        _require_same_kind(known, rule, specs)
        return known

    def _grouped_entry(
        self,
        slots: Sequence[Slot],
        rule: Rule,
        specs: Sequence[TensorSpec] | None,
        device: torch.device,
    ) -> GroupedStatistics:
        """Return the statistics that a graph updates for slots of stacks, by index."""
        name = slots[0].name
        if name not in self._grouped:
            members = [
                tuple(own for each in alike for own in each)
                for alike in zip(*map(self.plan.members, slots), strict=True)
            ]
            known = GroupedStatistics.start(
                Rule(slots[0]), [own[0] for own in members], specs, device
            )
            self._grouped[name] = known
            for statistics, own in zip(known.of_group, members, strict=True):
                if own[0].name in self._stored:
                    statistics.restore(self._stored[own[0].name])
                self._own.update({slot.name: statistics for slot in own})
                self._sharing.update({slot.name: own for slot in own})
        known = self._grouped[name]
        _require_same_kind(known.of_group[0], rule, specs)
        return known

    def shared_with(self, slot: Slot) -> tuple[Slot, ...]:
        """The slots that always see the same values as this one, itself included."""
        return self._sharing.get(slot.name, ())

    def of(self, slot: Slot) -> Statistics | None:
        """What is known of a slot; over ranks that is what all have seen, once it is finalized.

        If its value is equalized, this is what it would have seen of the scaled value; and it may
        be what all matrices of a stack have seen.
        """
        return self.rescaled.get(slot.name) or self.unscaled(slot)

    def unscaled(self, slot: Slot) -> Statistics | None:
        """What is known of a slot, of its value as it was before equalization."""
        return self.replaced.get(slot.name) or self.gathered(slot)

    def gathered(self, slot: Slot) -> Statistics | None:
        """What a slot itself has seen; over ranks that is what all have, once it is finalized."""
        for known in (self._of_all_ranks or {}, self._own, self._stored):
            if slot.name in known:
                return known[slot.name]
        return None

    def seen(self, slot: Slot) -> int:
        """How many values a slot has seen."""
        known = self.of(slot)
        return 0 if known is None else int(known.seen)

    def tokens(self, slot: Slot) -> int:
        """How many tokens a slot has seen, without padding."""
        known = self.of(slot)
        return 0 if known is None else int(known.tokens)

    def observer(self, slot: Slot) -> Observer:
        """An eager observer with what is known of a slot; without statistics if nothing is."""
        known = self.of(slot)
        if known is None:
            return slot.make_observer()
        observer = known.observer()
        observer.slot = slot.name
        return observer

    def snapshot(self, plan: Plan | None = None) -> dict[str, Statistics]:
        """The statistics of all slots that have seen anything, as values that stay.

        :param plan: a part of the plan, for the slots of that part alone
        """
        copies: dict[int, Statistics] = {}  # slots that share statistics share the copy
        found = {}
        for slot in self._gathering(plan):
            known = self.gathered(slot)
            if known is not None and not known.is_empty:
                found[slot.name] = copies.setdefault(id(known), known.current())
        return found

    def merge_ranks(self, plan: Plan | None = None) -> None:
        """Merge the statistics of all ranks, if there are any, and answer for all from now on.

        :param plan: a part of the plan, for the slots of that part alone
        """
        if not have_ranks():
            return
        slots = {slot.name: slot for slot in self._gathering(plan)}
        sharing = {
            tuple(slot.name for slot in shared if slot.name in slots)
            for name, shared in self._sharing.items()
            if name in slots
        }
        first_of = {name: group[0] for group in agree_on_sharing(sorted(sharing)) for name in group}
        firsts = {name: slot for name, slot in slots.items() if first_of.get(name, name) == name}
        merged = merge_over_ranks(firsts, {**self._stored, **self._own}, last_batch=self.last_batch)
        for name in slots:
            first = first_of.get(name, name)
            if first in merged:
                merged[name] = merged[first]  # equal ones stay one
        self._of_all_ranks = {**(self._of_all_ranks or {}), **merged}

    def forget_ranks(self) -> None:
        """Answer for this rank alone again, where the merged statistics were not usable."""
        self._of_all_ranks = None
        self.rescaled, self.replaced = {}, {}

    def drop(self, slots: Iterable[Slot]) -> None:
        """Drop what slots have seen, to free its memory. Graphs that are bound to it keep it."""
        names = {slot.name for slot in slots}
        for known in (self._own, self._sharing, self._stored, self.rescaled, self.replaced):
            for name in names & known.keys():
                del known[name]
        if self._of_all_ranks is not None:
            for name in names & self._of_all_ranks.keys():
                del self._of_all_ranks[name]
        self._grouped = {
            name: known
            for name, known in self._grouped.items()
            if known.of_group[0].slot.name not in names
        }

    def merge_data(self) -> None:
        """Gather what data each rank has seen. Over ranks, every rank calls it."""
        self.data_parts = tuple(from_all_ranks(self.data_seen))
        self.data_seen = DataSeen.of_all(self.data_parts)

    def forget_stored(self) -> None:
        """Forget the statistics of an earlier run, and its data, which other ranks answer for."""
        self._stored, self.data_seen = {}, DataSeen()

    def restore(self, stored: Mapping[str, Statistics]) -> None:
        """Start from the statistics of an earlier run.

        :raises StatisticsError: if they are of another model, or do not carry this recipe
        """
        slots = {slot.name: slot for slot in self._gathering()}
        _require_same_model(stored, self.plan)
        problems = {}
        for name, slot in slots.items():
            if name not in stored:
                continue
            problem = problem_with(stored[name], slot)
            if problem is None:
                self._stored[name] = stored[name].for_slot(slot)
                if name in self._own:  # a graph was traced before
                    self._own[name].restore(self._stored[name])
            elif not slot.watches_input:  # a weight may be observed without
                problems[name] = problem
        if problems:
            raise StatisticsError(
                "the stored statistics do not carry this recipe: "
                + _grouped(problems)
                + ". Calibrate again with data"
            )

    def rewind(self, before: Mapping[str, Statistics]) -> None:
        """Return to a snapshot, and drop later observations."""
        kept = {name for known in self._grouped.values() for name in known.rewound(before)}
        self._grouped = {
            name: known
            for name, known in self._grouped.items()
            if known.of_group[0].slot.name in kept
        }
        for name, known in list(self._own.items()):
            if known.slot.name in kept:
                continue
            if name in before:
                known.restore(before[name])
            else:
                del self._own[name]
                self._sharing.pop(name, None)

    def signature(self, module: str | None) -> tuple[Any, ...]:
        """How a module is quantized, and which of its slots have qparams."""
        if module is None or self.qparams is None:
            return self.plan.signature(module)
        known = tuple(slot.name in self.qparams for slot in self.plan.slots_at(module))
        return (*self.plan.signature(module), *known)

    def _gathering(self, plan: Plan | None = None) -> Iterable[Slot]:
        plan = plan or self.plan
        yield from plan.activation_slots()
        yield from plan.watching_slots()
        yield from plan.channel_slots()


def _require_same_kind(known: Statistics, rule: Rule, specs: Sequence[TensorSpec] | None) -> None:
    """Refuse a graph that would write statistics of another kind into an entry."""
    kept = None if known.live is not None else {n: _kind(t) for n, t in known.tensors.items()}
    wanted = None if specs is None else {s.name: (s.shape, s.dtype, s.device) for s in specs}
    if known.rule != rule or kept != wanted:
        now = "statistics of its own" if specs is None else ", ".join(map(str, specs))
        raise StatisticsError(
            f"{known.slot.name} was observed as {known.described()} and is now observed as {now}; "
            "calibrate in one dtype and on one device"
        )


def _kind(tensor: torch.Tensor) -> tuple[tuple[int, ...], torch.dtype, torch.device]:
    return tuple(tensor.shape), tensor.dtype, tensor.device


def _require_same_model(stored: Mapping[str, Statistics], plan: Plan) -> None:
    strange = [
        known.slot.module for known in stored.values() if known.slot.module not in plan.places
    ]
    if stored and len(strange) == len(stored):
        raise StatisticsError(
            f"the stored statistics are of another model: they are of {strange[0]} and the like, "
            f"which this model does not have. Give the model that was calibrated"
        )


def _grouped(problems: Mapping[str, str]) -> str:
    """Problems with the slots that have them, the first few by name."""
    alike: dict[str, list[str]] = {}
    for name, problem in problems.items():
        alike.setdefault(problem, []).append(name)
    return "; ".join(f"{_first(names)}: {problem}" for problem, names in alike.items())


def _first(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _names(slots: Iterable[Slot]) -> str:
    return ", ".join(slot.name for slot in slots)
