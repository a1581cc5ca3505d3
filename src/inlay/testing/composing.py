"""Where a pass stands in the standard pipelines, and what these make of a graph with it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter

from inlay.calibration.pipelines import comparing, observing, quantizing
from inlay.equalization.equalization import Equalization
from inlay.graph import Pass, Pipeline, StatisticOf, added_inputs, observes
from inlay.graph.editing import leaves
from inlay.passes import (
    PREPARE,
    CompareLayers,
    FoldQParams,
    LowerToKernels,
    OutlineRepeats,
    PruneUnobserved,
    RemoveObservers,
    UseEqualized,
)
from inlay.recipe import Slot
from inlay.testing.graphs import GraphCase

__all__ = ["STANDARD", "Outcome", "Place", "Standard", "places_of", "standards"]

STANDARD = frozenset(
    {
        *PREPARE,
        CompareLayers,
        FoldQParams,
        LowerToKernels,
        OutlineRepeats,
        PruneUnobserved,
        RemoveObservers,
        UseEqualized,
    }
)


@dataclass(frozen=True, eq=False)
class Standard:
    """A pipeline that Inlay runs itself.

    :param name: its effect on a graph
    """

    name: str
    passes: tuple[Pass, ...]


@dataclass(frozen=True, eq=False)
class Place:
    """A place in a standard pipeline: before one of its passes, or at its end."""

    standard: Standard
    number: int

    @property
    def before(self) -> tuple[Pass, ...]:
        return self.standard.passes[: self.number]

    @property
    def after(self) -> tuple[Pass, ...]:
        return self.standard.passes[self.number :]

    def __str__(self) -> str:
        where = f"before {self.after[0].name}" if self.after else "at the end"
        return f"{where} in the pipeline that {self.standard.name}"


@dataclass(frozen=True, eq=False)
class Outcome:
    """What a graph does that a standard pipeline has made.

    :param statistics: of one call, by slot and name
    """

    outputs: tuple[Any, ...]
    statistics: Mapping[str, Mapping[str, torch.Tensor]]

    @classmethod
    def of(cls, gm: GraphModule, case: GraphCase) -> "Outcome":
        """Call a graph, with the scales and quantized weights that it asks for."""
        given = case.inputs_of(gm)
        with torch.no_grad():
            values = [v.clone() if isinstance(v, torch.Tensor) else v for v in given.values()]
            called = dict(zip(given, values, strict=True))
            results = Interpreter(gm).run(*values, enable_io_processing=False)
        kept: dict[str, dict[str, torch.Tensor]] = {}
        for node, what in added_inputs(gm.graph).items():
            if isinstance(what, StatisticOf):
                kept.setdefault(what.slot, {})[what.name] = called[node]
        seen = {slot for slot, tensors in kept.items() if int(tensors.get("seen", 0)) > 0}
        owners = {
            slot.name: first.name for first, *others in _observed(gm) for slot in (first, *others)
        }
        statistics = {slot: kept[owner] for slot, owner in owners.items() if owner in seen}
        return cls(tuple(leaves(results)), statistics)


def _observed(gm: GraphModule) -> Iterator[tuple[Slot, ...]]:
    """Yield the slots that are observed together, also in outlined bodies."""
    for part in gm.modules():
        if isinstance(part, GraphModule):
            yield from filter(None, map(observes, part.graph.nodes))


def standards(case: GraphCase) -> tuple[Standard, ...]:
    """The pipelines that observe, quantize and compare, for the model of a case."""
    plan, layouts = case.plan, case.configuration["layouts"]
    qparams = case.configuration["qparams"]
    equalized = Equalization(case.module, plan).parameters
    made: dict[str, Pipeline] = {
        "observes": observing(plan, layouts=layouts, outputs=False),
        "quantizes": quantizing(plan, qparams, equalized),
        "compares layers": comparing(plan, qparams, equalized),
    }
    return tuple(Standard(name, tuple(pipeline.passes)) for name, pipeline in made.items())


def places_of(
    standard: Standard, cls: type[Pass], after: Sequence[Pass | type[Pass]]
) -> Iterator[Place]:
    """Yield the places of a pipeline where a pass may stand.

    A standard one stands where it stands. Any other stands anywhere behind those standard
    passes that have to run before it.
    """
    everywhere = [Place(standard, number) for number in range(len(standard.passes) + 1)]
    kinds = [type(step) for step in standard.passes]
    if cls in STANDARD:
        yield from [everywhere[kinds.index(cls)]] if cls in kinds else []
        return
    needed = {kind for kind in map(_class_of, after) if kind in STANDARD}
    if needed <= set(kinds):
        first = max((kinds.index(kind) + 1 for kind in needed), default=0)
        yield from everywhere[first:]


def _class_of(step: Pass | type[Pass]) -> type[Pass]:
    return step if isinstance(step, type) else type(step)
