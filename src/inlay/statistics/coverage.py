"""How many tokens each expert has seen, and what is done about those that saw too few."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from inlay.errors import ConfigurationError, StatisticsError
from inlay.recipe import Plan, Slot
from inlay.statistics.by_slot import StatisticsBySlot
from inlay.statistics.on_disk import StoredStatistics
from inlay.statistics.value import Statistics, merge

__all__ = ["Coverage", "coverage", "fill_experts", "require_coverage", "require_same_tokens"]

# An expert saw few tokens if these are less than this part of what each would get of even routing.
_FEW = 1 / 20
# How many layers, and how many experts of a layer, an error names.
_NAMED = 8


@dataclass(frozen=True)
class Coverage:
    """The tokens that each expert of a layer has seen, without padding.

    :param experts: the name of the module that has the experts
    """

    experts: str
    tokens: tuple[int, ...]

    @property
    def share(self) -> float:
        """What each expert would have seen if all saw as many."""
        return sum(self.tokens) / len(self.tokens)

    @property
    def none(self) -> list[int]:
        """The numbers of the experts that saw no token."""
        return [number for number, count in enumerate(self.tokens) if count == 0]

    @property
    def few(self) -> list[int]:
        """The numbers of the experts that saw some tokens, but few."""
        return [n for n, count in enumerate(self.tokens) if 0 < count < self.share * _FEW]

    @property
    def starved(self) -> list[int]:
        return sorted([*self.none, *self.few])

    def __str__(self) -> str:
        if not any(self.tokens):
            return f"{self.experts} (no token at all)"
        named = [f"{number}: {self.tokens[number]:,}" for number in self.starved[:_NAMED]]
        more = f" and {len(self.starved) - _NAMED} more" if len(self.starved) > _NAMED else ""
        share = f"an even share of its {sum(self.tokens):,} would be {self.share:,.0f}"
        return f"{self.experts} ({', '.join(named)}{more}; {share})"


def coverage(statistics: StatisticsBySlot, plan: Plan | None = None) -> list[Coverage]:
    """Count the tokens of each expert, for every layer whose experts have to see data.

    :param plan: a part of the plan, for the layers of that part alone
    """
    plan = plan or statistics.plan
    found = []
    for experts, slots in groupby(_observed(plan), lambda s: s.module.rpartition(".")[0]):
        members = plan.members(next(slots))
        known = (statistics.gathered(own) for own, *_ in members)
        tokens = tuple(0 if each is None else int(each.tokens) for each in known)
        found.append(Coverage(experts, tokens))
    return found


def require_coverage(
    statistics: StatisticsBySlot, accept: Collection[str], plan: Plan | None = None
) -> None:
    """Refuse scales of experts that rest on no tokens, or on few.

    :param plan: a part of the plan, for the layers of that part alone
    :raises StatisticsError: unless they are accepted, which a server must be able to load
    """
    is_filled = statistics.plan.recipe.experts in ("fill", "layer")
    starved = (each for each in coverage(statistics, plan) if each.starved)
    refused = [
        each
        for each in starved
        if not (is_filled and any(each.tokens)) and not _is_accepted(each, accept)
    ]
    if not refused:
        return
    named = "; ".join(map(str, refused[:_NAMED]))
    more = f"; and {len(refused) - _NAMED} more layers" if len(refused) > _NAMED else ""
    raise StatisticsError(
        f"experts saw too few tokens for scales of their own: {named}{more}. Run more batches, or "
        'other kinds of text; set experts="fill" in the recipe, which gives these experts the '
        'range of their layer, experts="layer", which gives it to all, or experts="all", which '
        "calibrates every expert with every token" + _acceptable(refused)
    )


def _is_accepted(each: Coverage, accept: Collection[str]) -> bool:
    if not any(each.tokens):
        return "unobserved" in accept
    return not each.none and "few_tokens" in accept


def _acceptable(refused: Iterable[Coverage]) -> str:
    refused = list(refused)
    if all(not any(each.tokens) for each in refused):
        return (
            ". Experts are observed where they run as one grouped product: "
            'model.set_experts_implementation("grouped_mm"). To leave layers that no token reached '
            'in full precision, use finalize(accept={"unobserved"})'
        )
    if not any(each.none for each in refused):
        return '; or take what they saw with finalize(accept={"few_tokens"})'
    return ". No server loads experts of which only some are quantized, so they cannot be left out"


def fill_experts(statistics: StatisticsBySlot, plan: Plan | None = None) -> None:
    """Give experts the statistics of their layer, where the recipe asks for that.

    What was gathered stays as it is.

    :param plan: a part of the plan, for the layers of that part alone
    :raises StatisticsError: if the observer keeps statistics that cannot be merged
    """
    plan = plan or statistics.plan
    wanted = plan.recipe.experts
    if wanted not in ("fill", "layer"):
        return
    starved = {each.experts: set(each.starved) for each in coverage(statistics, plan)}
    for slot in _observed(plan):
        members = plan.members(slot)
        known = [each for own, *_ in members if (each := statistics.gathered(own)) is not None]
        seen = [each for each in known if not each.is_empty]
        numbers = (
            starved[slot.module.rpartition(".")[0]] if wanted == "fill" else range(len(members))
        )
        if seen and numbers:
            layer = _merged(slot, seen)
            statistics.replaced.update(
                {own.name: layer.for_slot(own) for n in numbers for own in members[n]}
            )


def require_same_tokens(plan: Plan, stored: StoredStatistics) -> None:
    """Refuse statistics of experts that were given all tokens for those that were not, and back."""
    gathered, wanted = stored.recipe.get("experts", "routed"), plan.recipe.experts
    of_experts = any(plan.is_routed(known.slot.module) for known in stored.slots.values())
    if of_experts and (gathered == "all") != (wanted == "all"):
        raise ConfigurationError(
            f'the stored statistics of experts were gathered with experts="{gathered}", and the '
            f'recipe asks for experts="{wanted}"; calibrate again, or give the recipe the same'
        )


def _merged(slot: Slot, seen: Sequence[Statistics]) -> Statistics:
    try:
        return merge(*seen)
    except StatisticsError as error:
        raise StatisticsError(
            f"the experts of {slot.module} cannot have the range of their layer: {error}; name "
            "another observer"
        ) from error


def _observed(plan: Plan) -> Iterator[Slot]:
    """Yield the slots of all experts in a parameter that have to see data, layer by layer."""
    for name in plan.stacks:
        slots = plan.of_module(name)
        found = (slots.get("input"), *plan.watches(name).values())
        yield from (slot for slot in found if slot is not None and slot.is_observed)
