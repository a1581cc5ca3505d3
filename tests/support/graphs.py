"""Small graphs for tests of passes, and ways to look at them."""

from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from inlay.graph import GraphInput, QParamOf, added_inputs, bind, format_graph
from inlay.observers import QParamsDict
from inlay.passes import Annotate, InsertObservers, Pass, Pipeline, ShareObservers
from inlay.recipe import Plan
from inlay.testing.graphs import (
    STATIC,
    TRACERS,
    constant_of,
    dynamo_graph,
    inputs_for,
    qparams_of,
    trace,
)

__all__ = [
    "STATIC",
    "TRACERS",
    "Functional",
    "dynamo_graph",
    "inputs_for",
    "linear",
    "observed",
    "ops",
    "qparams_of",
    "targets",
    "trace",
    "with_constants",
]


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


def observed(gm: GraphModule, plan: Plan, *more: Pass) -> GraphModule:
    pipeline = Pipeline((Annotate(plan=plan), InsertObservers(), ShareObservers(), *more))
    return pipeline(gm).graph_module


def with_constants(
    gm: GraphModule, plan: Plan, model: nn.Module, qparams: dict[str, QParamsDict]
) -> GraphModule:
    """A folded graph with its scales and folded weights as constants."""

    def constant(what: GraphInput) -> torch.Tensor:
        if isinstance(what, QParamOf):
            return qparams[what.slot][what.name]
        slot = plan.slots[what.owner]
        weight = model.get_submodule(slot.module).weight
        return constant_of(what, weight, slot.args, qparams[slot.name])

    return bind(gm, {what: constant(what) for what in added_inputs(gm.graph).values()})


def ops(gm: GraphModule) -> list[str]:
    """What the graph computes, as `op(arguments)`, with inputs that passes added left out."""
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
