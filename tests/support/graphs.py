"""Small graphs for tests of passes, and ways to look at them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, symbolic_trace

from inlay import Recipe
from inlay.graph import SlotInput, bind, inputs_of, propagate_shapes, slot_inputs, tensor_of
from inlay.nodes.quantize import fold_weight
from inlay.observers import QParamsDict
from inlay.passes import Annotate, InsertObservers, Pass, Pipeline, ShareObservers
from inlay.recipe import Plan, make_observer

STATIC = Recipe.from_preset("W8A8_STATIC", inputs={"observer": "static_minmax"})


class Functional(nn.Module):
    """A root whose forward is a function of it, so that a graph is what the test says it is."""

    def __init__(self, forward: Any, **modules: nn.Module) -> None:
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)
        self.function = forward

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, x)


def linear(rows: int = 4, columns: int = 4, *, seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(columns, rows, bias=False)


def dynamo_graph(model: nn.Module, *args: Any, **kwargs: Any) -> tuple[GraphModule, list[Any]]:
    """The graph that Dynamo hands to a backend, and the inputs it would be called with."""
    captured: list[Any] = []

    def backend(gm: GraphModule, inputs: Sequence[Any]) -> Any:
        captured.append((gm, list(inputs)))
        return gm.forward

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(model, backend=backend)(*args, **kwargs)
    ((gm, inputs),) = captured
    return gm, inputs


def trace(how: str, model: nn.Module, *args: torch.Tensor) -> GraphModule:
    """The model's graph by one of three tracers, with the tensors behind its inputs known."""
    if how == "dynamo":
        from inlay.graph import label_inputs

        gm, inputs = dynamo_graph(model, *args)
        return label_inputs(gm, inputs)
    if how == "export":
        return torch.export.export(model, args).module(check_guards=False)
    return propagate_shapes(symbolic_trace(model), *args)


TRACERS = ["dynamo", "export", "symbolic_trace"]


def observed(gm: GraphModule, plan: Plan, *more: Pass) -> GraphModule:
    pipeline = Pipeline((Annotate(plan=plan), InsertObservers(), ShareObservers(), *more))
    return pipeline(gm).graph_module


def qparams_of(
    plan: Plan, model: nn.Module, values: dict[str, torch.Tensor]
) -> dict[str, QParamsDict]:
    """Qparams by eager observers: of the model's weights, and of the values of other slots."""
    found = {}
    for slot in plan.slots.values():
        if slot.is_observed:
            weight = slot.base_name == "weight"
            value = model.get_submodule(slot.module).weight if weight else values[slot.name]
            observer = make_observer(slot.base_name, slot.args)
            found[slot.name] = observer(value.detach()).get_qparams()
    return found


def with_constants(
    gm: GraphModule, plan: Plan, model: nn.Module, qparams: dict[str, QParamsDict]
) -> GraphModule:
    """A folded graph with its scales and folded weights as constants."""

    def constant(what: SlotInput) -> torch.Tensor:
        if what.key != "folded":
            return qparams[what.slot][what.key]
        slot = plan.slots[what.slot]
        return fold_weight(model.get_submodule(slot.module).weight, slot.args, qparams[slot.name])

    return bind(gm, {what: constant(what) for what in slot_inputs(gm.graph).values()})


def inputs_for(gm: GraphModule, *args: torch.Tensor) -> list[torch.Tensor]:
    """What to call a graph with: the tensors it was traced with, or these where it has none."""
    given = iter(args)
    known = [tensor_of(gm, node) for node in inputs_of(gm.graph)]
    return [next(given) if tensor is None else tensor for tensor in known]


def ops(gm: GraphModule) -> list[str]:
    """What the graph computes, as `op(arguments)`, with inputs that passes added left out."""
    from inlay.graph import format_graph

    lines = format_graph(gm).splitlines()[1:]
    return [_without_types(line.strip()) for line in lines]


def _without_types(line: str) -> str:
    name, colon, rest = line.partition(": ")
    if colon and " = " in rest and "(" not in name:
        return f"{name} = {rest.partition(' = ')[2]}"
    return line


def targets(gm: GraphModule) -> list[str]:
    return [
        str(getattr(node.target, "__name__", node.target))
        for node in gm.graph.nodes
        if node.op not in ("placeholder", "get_attr", "output")
    ]
