"""Equalization of a model: its groups, the scales that statistics ask for, and what follows."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median_low
from typing import Any

import torch
from torch import nn

from inlay.collectives import each_by_one_rank, from_all_ranks
from inlay.equalization.collected import CollectedGroups
from inlay.equalization.group import Group
from inlay.equalization.parameters import EqualizedParameters
from inlay.equalization.scales import Channels, Reader, Scales, scales_of
from inlay.equalization.weight_only import activation_aware_scales_of
from inlay.errors import StatisticsError
from inlay.graph import Equalizable, Lookup
from inlay.recipe import Plan, Slot, Strength, channels_of
from inlay.statistics.by_slot import StatisticsBySlot
from inlay.statistics.on_disk import StoredStatistics
from inlay.statistics.value import Statistics, measure

__all__ = ["Equalization", "EqualizedGroup"]

WeightOf = Callable[[str], torch.Tensor]
Some = Callable[[Group], bool]  # tells whether a group is one of some

_SECOND_RUN = (
    "the data is run twice: first for the ranges of channels and for what equalization leaves "
    "alone, then for the inputs that are equalized, whose observers have to see them scaled"
)


@dataclass(frozen=True, kw_only=True)
class EqualizedGroup:
    """What equalization did to a group.

    :param before: how many times larger its largest channel was than the median one
    :param after: the same for the scaled channels
    """

    group: Group
    strength: float
    before: float
    after: float

    def __str__(self) -> str:
        return (
            f"equalized with strength {self.strength:g}; the largest channel was "
            f"{self.before:.1f} times the median one, and is {self.after:.1f} times"
        )


class Equalization:
    """The groups of a model, and its parameters once these are scaled."""

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        self.plan = plan
        self.parameters = EqualizedParameters(model)
        self.collected = CollectedGroups(
            self.parameters.name_of,
            lambda weight: plan.owners(weight, "linear") or plan.owners(weight, "grouped"),
            self._parameter_of,
        )
        self._done: dict[Group, EqualizedGroup] = {}
        self._scales: dict[Group, Scales] = {}
        self._has_heard = False  # of groups, from other ranks, and has traced nothing itself
        # Whether the scales stay as they are, because data is observed through scaled parameters.
        self.is_settled = False

    def take_in(self, found: Equalizable, lookup: Lookup) -> None:
        """Take in what a graph says, for the parameters that it is called with.

        :raises StatisticsError: if parameters are scaled already that this graph does not let scale
        """
        self.collected.add(found, lookup)
        groups = self.collected.groups
        lost = self._scales.keys() - set(self._each(groups)) if self.is_settled else ()
        if lost:
            names = ", ".join(sorted(group.name for group in lost))
            raise StatisticsError(
                f"a graph that the first run over the data did not meet uses the parameters of "
                f"{names} otherwise, and their inputs are equalized already; run the same batches "
                "both times"
            )

    def restore(self, stored: StoredStatistics) -> None:
        """Take in the groups of stored statistics, and the scales if these were settled.

        :raises StatisticsError: if they were gathered without the ranges of channels, or from
            inputs that were equalized otherwise
        """
        _require_same_strength(stored, self.plan)
        if self.plan.recipe.equalize is None:
            return
        if "equalize" not in stored.recipe:
            raise StatisticsError(
                "the stored statistics hold no ranges of channels, which equalize needs; calibrate "
                "again with data and equalize, of any strength"
            )
        self.collected.restore(map(Group.from_plain, stored.groups))
        if stored.is_second_run and self.plan.needs_second_run:
            self._scales = _stored_scales(stored, self._each(self.collected.groups))
            self._scale_parameters()
            self.is_settled = True

    def decided(self, of: Some) -> dict[str, Any]:
        """Return some groups and their scales, as `StoredStatistics` has them."""
        groups = [group for group in self.collected.groups if of(group)]
        chosen = {
            each.name: self._scales[each]
            for group in groups
            for each in group.each(self.plan)
            if each in self._scales
        }
        return {
            "groups": tuple(group.to_plain() for group in groups),
            "scales": {name: scales.values for name, scales in chosen.items()},
            "strengths": {name: scales.strength for name, scales in chosen.items()},
        }

    def take_up(self, stored: StoredStatistics, statistics: StatisticsBySlot) -> None:
        """Take up the scales that an interrupted run has decided for some groups."""
        groups = list(map(Group.from_plain, stored.groups))
        self.collected.restore(groups)
        self._scales.update(_stored_scales(stored, self._each(groups)))
        self._scale_parameters()
        self.apply(statistics, lambda group: group in groups)

    def _parameter_of(self, reader: str) -> str:
        return self.parameters.first_name(self.plan.weights_of(reader)[0].parameter)

    def _each(self, groups: Iterable[Group]) -> list[Group]:
        """Return the groups that have scales of their own: those of stacks, matrix by matrix."""
        return [each for group in groups for each in group.each(self.plan)]

    def stored(self) -> tuple[dict[str, Any], ...]:
        """The groups, to be kept on disk."""
        return tuple(group.to_plain() for group in self.collected.groups)

    def settled(self) -> dict[str, Scales]:
        """The scales that data is observed with, by group, to be kept on disk."""
        return {group.name: s for group, s in self._scales.items()} if self.is_settled else {}

    def described(self) -> list[str]:
        """Explain for each value, in a line, whether it is equalized, and why not."""
        if self.plan.recipe.equalize is None:
            return []
        known = {each.group: each for each in self.done}
        lines = [_SECOND_RUN] if self.plan.needs_second_run else []
        for group in self.collected.groups:
            scaled = ", ".join(producer.parameter for producer in group.producers)
            line = f"{', '.join(group.readers)}: channels can be equalized, in {scaled}"
            if group in known:
                line = f"{', '.join(group.readers)}: {known[group]}, in {scaled}"
            lines.append(line)
        lines += [f"{reader}: not equalized: {reason}" for reader, reason in self.refused.items()]
        return lines

    @property
    def refused(self) -> dict[str, str]:
        """Why the inputs of modules are not equalized, by module."""
        return self.collected.refused

    @property
    def done(self) -> tuple[EqualizedGroup, ...]:
        """What equalization did to the groups that have scales."""
        return tuple(self._done[group] for group in self.collected.groups if group in self._done)

    def apply(self, statistics: StatisticsBySlot, of: Some | None = None) -> None:
        """Say what slots would have seen of the scaled values, and what was done to groups.

        :param of: predicate that selects groups; others stay unchanged
        """
        if of is None:
            self._done, statistics.rescaled = {}, {}
        for group in self.collected.groups:
            if of is not None and not of(group):
                continue
            found = [
                own
                for each in group.each(self.plan)
                if each in self._scales and (own := self._equalized(each, statistics)) is not None
            ]
            if found:  # else a rank has seen nothing of the data
                self._done[group] = _together(group, found)

    def _equalized(self, group: Group, statistics: StatisticsBySlot) -> EqualizedGroup | None:
        """Estimate the statistics of the slots of a group; None without data."""
        channels, scales = _channels(group, statistics), self._scales[group]
        if channels is None:
            return None
        after = channels.divided(scales.values)
        statistics.rescaled.update(self._rescaled(group, statistics, after, scales.values))
        return EqualizedGroup(
            group=group,
            strength=scales.strength,
            before=_unevenness(channels.sizes),
            after=_unevenness(after.sizes),
        )

    def choose(
        self, statistics: StatisticsBySlot, weight_of: WeightOf, of: Some | None = None
    ) -> None:
        """Choose strength and scales of each group, and have parameters scaled.

        One rank chooses for all, so ranks agree to the last bit, whatever they compute with.

        :param weight_of: gives the weight of a module as the model has it
        :param of: predicate that selects groups; the scales of others stay
        """
        if self.plan.recipe.equalize is None:
            return
        strength = self.plan.recipe.equalize
        seen = {
            group: channels
            for group in self._each(self._agree_over_ranks(of))
            if (channels := _channels(group, statistics)) is not None
        }
        named = {str(place): group for place, group in enumerate(seen)}

        def scales(names: Iterable[str]) -> Iterator[tuple[str, tuple[float, torch.Tensor]]]:
            for name in names:
                group = named[name]
                readers = [self._reader(reader, weight_of(reader)) for reader in group.readers]
                found = _scales(group, seen[group], readers, strength)
                yield name, (found.strength, found.values)

        chosen = each_by_one_rank(
            {
                name: sum(weight_of(reader).numel() for reader in group.readers)
                for name, group in named.items()
            },
            scales,
            device_of=lambda name: seen[named[name]].low.device,
        )
        if of is None:
            self._scales = {}
        for name, (own_strength, values) in chosen.items():
            self._scales[named[name]] = Scales(values=values, strength=own_strength)
        self._scale_parameters()

    def _scale_parameters(self) -> None:
        values = {group: scales.values for group, scales in self._scales.items()}
        self.parameters.scale(values, self._parameter_of)

    def hear_of_groups(self) -> None:
        """Let ranks that have traced nothing know the groups that others have found so far."""
        of_ranks = from_all_ranks(self.collected.groups)
        if self.collected.is_empty and any(of_ranks):
            groups = next(groups for groups in of_ranks if groups)
            self._has_heard = True
            self.collected.restore(groups)

    def _agree_over_ranks(self, of: Some | None) -> list[Group]:
        """Equalize on all ranks what each rank with data would; return these groups.

        A rank without data has traced nothing, and has no say.
        """
        known = self.collected.groups
        own = [group for group in known if of is None or of(group)]
        of_ranks = [groups for groups in from_all_ranks([] if self._has_heard else own) if groups]
        if not of_ranks:
            return []
        agreed = [group for group in of_ranks[0] if all(group in each for each in of_ranks)]
        # The order decides how scales are rounded, so it is that of one rank, on all ranks.
        agreed_on = iter(agreed)
        kept = [next(agreed_on, None) if group in own else group for group in known]
        self.collected.agree_on([*(group for group in kept if group is not None), *agreed_on])
        return agreed

    def _reader(self, name: str, weight: torch.Tensor) -> Reader:
        slots = self.plan.of_module(name)
        return Reader(
            weight=weight,
            weight_args=slots["weight"].args if "weight" in slots else None,
            input_args=slots["input"].args if "input" in slots else None,
        )

    def _rescaled(
        self,
        group: Group,
        statistics: StatisticsBySlot,
        channels: Channels,
        scales: torch.Tensor,
    ) -> dict[str, Statistics]:
        """What the slots of a group's readers would have seen of the scaled value."""
        found: dict[str, Statistics] = {}
        divided: dict[int, Statistics] = {}  # readers of one value share what is gathered of it
        # The range of a value with these two rows is that of all rows.
        extremes = torch.stack([channels.low, channels.high])
        for reader in group.readers:
            slots = self.plan.of_module(reader)
            read = slots.get("input")
            if read is not None and read.is_observed and not read.sees_scaled:
                found[read.name] = _after(read, statistics, extremes)
            for watch in self.plan.watches(reader).values():
                known = statistics.unscaled(watch)
                if known is not None and not known.is_empty:
                    if id(known) not in divided:
                        tensors = watch.observer_class.divide_input(known.tensors, scales)
                        divided[id(known)] = replace(known, tensors=tensors)
                    found[watch.name] = divided[id(known)]
        return found


def _stored_scales(stored: StoredStatistics, groups: Iterable[Group]) -> dict[Group, Scales]:
    return {
        group: Scales(values=stored.scales[group.name], strength=stored.strengths[group.name])
        for group in groups
        if group.name in stored.scales
    }


def _channels(group: Group, statistics: StatisticsBySlot) -> Channels | None:
    """What any reader saw of the channels; None without data."""
    slots = (statistics.plan.of_module(name) for name in group.readers)
    seen = [statistics.of(channels_of(each)) for each in slots]
    known = [each for each in seen if each is not None and not each.is_empty]
    if len(known) < len(group.readers):
        return None
    if any("magnitudes" not in each.tensors for each in known):
        raise StatisticsError(
            f"the stored statistics of {group.name} do not say how large channels are on average; "
            "calibrate again with data"
        )
    channels = Channels(
        low=torch.stack([each.tensors["min_vals"] for each in known]).amin(0),
        high=torch.stack([each.tensors["max_vals"] for each in known]).amax(0),
        means=torch.stack(
            [each.tensors["magnitudes"] / each.tokens.clamp(min=1) for each in known]
        ).amax(0),
    )
    return channels if bool(channels.sizes.isfinite().all()) else None


def _scales(
    group: Group, channels: Channels, readers: Sequence[Reader], strength: Strength
) -> Scales:
    if all(reader.input_args is None for reader in readers):
        return activation_aware_scales_of(group, channels.means, readers, strength)
    return scales_of(group, channels, readers, strength)


def _after(slot: Slot, statistics: StatisticsBySlot, extremes: torch.Tensor) -> Statistics:
    """The statistics of a slot, had it seen the scaled value."""
    known = statistics.unscaled(slot)
    found = measure(slot, extremes)
    return found if known is None else replace(found, seen=known.seen, tokens=known.tokens)


def _require_same_strength(stored: StoredStatistics, plan: Plan) -> None:
    """Refuse statistics of equalized inputs for a recipe that equalizes them otherwise."""
    if not stored.scales or not any(slot.base_name == "input" for slot in plan.activation_slots()):
        return
    strength = stored.recipe.get("equalize")
    if plan.recipe.equalize != strength or not plan.needs_second_run:
        raise StatisticsError(
            f"the stored statistics are of inputs that were equalized with strength {strength}; "
            "ask for the same strength and observer, or calibrate again with data. With "
            "static_minmax statistics are stored that serve every strength"
        )


def _together(group: Group, found: Sequence[EqualizedGroup]) -> EqualizedGroup:
    """Summarize what equalization did to a group by the worst of its matrices."""
    return EqualizedGroup(
        group=group,
        strength=median_low(each.strength for each in found),
        before=max(each.before for each in found),
        after=max(each.after for each in found),
    )


def _unevenness(sizes: torch.Tensor) -> float:
    middle = float(sizes.median())
    return float(sizes.amax()) / middle if middle else float("inf")
