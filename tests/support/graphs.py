"""Small graphs for tests of passes, and ways to look at them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, symbolic_trace

from inlay import Recipe
from inlay.graph import propagate_shapes
from inlay.passes import Annotate, InsertObservers, Pass, Pipeline, ShareObservers
from inlay.recipe import Plan

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
