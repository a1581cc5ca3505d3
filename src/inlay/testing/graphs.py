"""Graphs for laws about passes: traced from generated models, or given, with what to call them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn
from torch.fx import GraphModule, symbolic_trace

from inlay.graph import (
    fake_value,
    inputs_of,
    label_inputs,
    propagate_shapes,
    slot_input,
    tensor_of,
)
from inlay.observers import QParamsDict
from inlay.recipe import Plan, Recipe, make_observer
from inlay.testing.modules import PLAIN, example_inputs, modules

__all__ = [
    "STATIC",
    "TRACERS",
    "GraphCase",
    "dynamo_graph",
    "graphs",
    "inputs_for",
    "qparams_of",
    "trace",
]

STATIC = Recipe.from_preset("W8A8_STATIC", inputs={"observer": "static_minmax"})
TRACERS = ("dynamo", "export", "symbolic_trace")


def dynamo_graph(model: nn.Module, *args: Any, **kwargs: Any) -> tuple[GraphModule, list[Any]]:
    """The graph that Dynamo hands to a backend, and the inputs it would be called with."""
    captured: list[Any] = []

    def backend(gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        captured.append((gm, list(inputs)))
        return gm.forward

    torch.compiler.reset()
    with torch.no_grad():
        torch.compile(model, backend=backend)(*args, **kwargs)
    ((gm, inputs),) = captured
    return gm, inputs


def trace(how: str, model: nn.Module, *args: torch.Tensor) -> GraphModule:
    """The model's graph by one of `TRACERS`, with the tensors behind its inputs known."""
    if how == "dynamo":
        gm, inputs = dynamo_graph(model, *args)
        return label_inputs(gm, inputs)
    if how == "export":
        exported = torch.export.export(model, args).module(check_guards=False)
        assert isinstance(exported, GraphModule)
        return exported
    return propagate_shapes(symbolic_trace(model), *args)


def inputs_for(gm: GraphModule, *args: Any) -> list[Any]:
    """What to call a graph with: the tensors it was traced with, or these where it has none.

    Inputs that passes added are zeros of their shapes.
    """
    given = iter(args)
    found = []
    for node in inputs_of(gm.graph):
        known = tensor_of(gm, node)
        if known is not None:
            found.append(known)
        elif slot_input(node) is not None:
            found.append(_zeros(fake_value(node)))
        else:
            found.append(next(given))
    return found


def _zeros(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.zeros(tuple(value.shape), dtype=value.dtype)


def qparams_of(
    plan: Plan, model: nn.Module, values: Mapping[str, torch.Tensor] | None = None
) -> dict[str, QParamsDict]:
    """Qparams by eager observers: of the model's weights, and of the values of other slots.

    :param values: by slot; for others a value that any observer takes
    """
    found = {}
    for slot in plan.slots.values():
        if slot.is_observed:
            layer: Any = model.get_submodule(slot.module)
            value = layer.weight if slot.is_weight else (values or {}).get(slot.name)
            if value is None:
                value = torch.linspace(-1, 1, layer.weight.shape[-1])
            observer = make_observer(slot.base_name, slot.args)
            found[slot.name] = observer(value.detach()).get_qparams()
    return found


@dataclass(frozen=True, eq=False)
class GraphCase:
    """A graph to run a pass on.

    :param how: the tracer; None for a graph that was given
    :param inputs: what the model, or the given graph, is called with
    """

    module: nn.Module
    how: str | None
    inputs: tuple[Any, ...]

    @cached_property
    def graph_module(self) -> GraphModule:
        if self.how is None:
            assert isinstance(self.module, GraphModule)
            return self.module
        return trace(self.how, self.module, *self.inputs)

    @cached_property
    def plan(self) -> Plan:
        return Plan(self.module, STATIC)

    @cached_property
    def configuration(self) -> dict[str, Any]:
        """What fields of passes are filled with."""
        if not any(isinstance(part, nn.Linear) for part in self.module.modules()):
            return {}
        return {"plan": self.plan, "qparams": qparams_of(self.plan, self.module)}

    def __str__(self) -> str:
        if self.how is None:
            return f"    the given graph:\n{self.graph_module.code}"
        return (
            f"    model = {self.module!r}\n"
            f"    graph_module = inlay.testing.trace({self.how!r}, model, *example_inputs())"
        )

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text("…")  # Hypothesis repeats it after the message, which has it already


def graphs(tracers: Sequence[str] = ("export", "symbolic_trace")) -> st.SearchStrategy[GraphCase]:
    """Graphs of generated models, by each of these tracers."""

    def of(how: str) -> st.SearchStrategy[GraphCase]:
        drawn = modules(PLAIN) if how == "symbolic_trace" else modules()
        return drawn.map(lambda module: GraphCase(module, how, example_inputs()))

    return st.one_of([of(how) for how in tracers])
