"""What a report says of experts: their tokens, their errors, and those that saw too little."""

from collections.abc import Iterable, Iterator, Mapping

from inlay.model import Stack
from inlay.report.data import ExpertLayer, Finding, LayerError
from inlay.statistics.by_slot import StatisticsBySlot
from inlay.statistics.coverage import coverage

__all__ = ["about_coverage", "expert_layers"]

_TAKEN = {
    "fill": "They have the range of their layer.",
    "layer": "All experts of the layer have its range.",
}


def expert_layers(
    statistics: StatisticsBySlot, layers: Iterable[LayerError]
) -> Iterator[ExpertLayer]:
    """Yield the layers with experts that have statistics, in the order of depth.

    :param layers: errors of modules, those of single experts among them
    """
    errors = {layer.module: layer.sqnr_db for layer in layers}
    known = {each.experts: each for each in coverage(statistics)}
    stacks: dict[str, list[Stack]] = {}
    for stack in statistics.plan.stacks.values():
        stacks.setdefault(stack.holder, []).append(stack)
    for experts, own in stacks.items():
        sqnr = tuple(_worst(own, number, errors) for number in range(len(own[0].by_index)))
        seen = known.get(experts)
        if seen is None and all(each is None for each in sqnr):
            continue
        yield ExpertLayer(
            module=experts,
            tokens=() if seen is None else seen.tokens,
            starved=() if seen is None else tuple(seen.starved),
            sqnr_db=() if all(each is None for each in sqnr) else sqnr,
        )


def _worst(
    stacks: Iterable[Stack], number: int, errors: Mapping[str, float | None]
) -> float | None:
    """Return the SQNR of the worst projection of an expert; None if no data reached it."""
    weights = (weight for stack in stacks for weight in stack.by_index[number])
    found = [error for each in weights if (error := errors.get(each.module)) is not None]
    return min(found, default=None)


def about_coverage(statistics: StatisticsBySlot) -> Iterator[Finding]:
    """Warn of experts that saw no token, or few."""
    recipe = statistics.plan.recipe
    advice = 'calibrate on more data, or set experts="fill" in the recipe.'
    for each in coverage(statistics):
        if each.starved:
            yield Finding(
                severity="warning",
                about=each.experts,
                text=f"{len(each.starved)} of {len(each.tokens)} experts saw too few tokens for "
                f"scales of their own: {each}. "
                + _TAKEN.get(recipe.experts, f"Their scales rest on little data; {advice}"),
            )
