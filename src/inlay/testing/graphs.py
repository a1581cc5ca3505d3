"""Graphs for laws about passes: traced from generated models, or given, with what to call them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs
from hypothesis import strategies as st
from torch import nn
from torch.fx import GraphModule, Node, symbolic_trace
from torch.fx.node import map_arg

from inlay.equalization.group import Group
from inlay.equalization.parameters import EqualizedParameters
from inlay.graph import (
    MAIN,
    EqualizedOf,
    ErrorSums,
    GraphInput,
    IntegersOf,
    IntegerSumsOf,
    PaddingMask,
    QParamOf,
    StatisticOf,
    WeightOf,
    added_input,
    added_inputs,
    fake_value,
    inputs_of,
    label_inputs,
    propagate_shapes,
    tensor_of,
)
from inlay.nodes.kernels import column_sums, integer_weight
from inlay.nodes.quantize import fold_weight
from inlay.observers import QParamsDict
from inlay.padding.layouts import Layouts
from inlay.recipe import Plan, Recipe, make_observer
from inlay.testing.modules import PLAIN, example_inputs, modules

__all__ = [
    "STATIC",
    "TRACERS",
    "GraphCase",
    "Snapshot",
    "constant_of",
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
        elif added_input(node) is not None:
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
    :param inputs: arguments of the model, or of the given graph
    :param recipe: how the model is to be quantized
    """

    module: nn.Module
    how: str | None
    inputs: tuple[Any, ...]
    recipe: Recipe = STATIC

    @cached_property
    def graph_module(self) -> GraphModule:
        if self.how is None:
            assert isinstance(self.module, GraphModule)
            return self.module
        return trace(self.how, self.module, *self.inputs)

    @cached_property
    def plan(self) -> Plan:
        return Plan(self.module, self.recipe)

    @cached_property
    def configuration(self) -> dict[str, Any]:
        """What fields of passes are filled with."""
        linears = {n: m for n, m in self.module.named_modules() if isinstance(m, nn.Linear)}
        if not linears:
            return {}
        qparams = qparams_of(self.plan, self.module)
        tokens = PaddingMask(MAIN, ("batch", "tokens"))
        return {
            "plan": self.plan,
            "qparams": qparams,
            "equalized": _scaled(self.module, linears),
            "layouts": Layouts({f"{name}.input": tokens for name in linears}, frozenset({MAIN})),
        }

    def inputs_of(self, gm: GraphModule) -> dict[Node, Any]:
        """What to call a graph with that passes made of this one, by input."""
        found = dict(zip(inputs_of(gm.graph), inputs_for(gm, *self.inputs), strict=True))
        for node, what in added_inputs(gm.graph).items():
            found[node] = self._of_pass(what, found[node])
        return found

    def _of_pass(self, what: GraphInput, value: Any) -> Any:
        """Return the scale, mask, or quantized or equalized weight that an input stands for."""
        qparams = self.configuration["qparams"]
        match what:
            case PaddingMask():
                return torch.ones_like(value)
            case EqualizedOf():
                return self.configuration["equalized"].named(what.owner)
            case QParamOf():
                return qparams[what.slot][what.name]
            case WeightOf() | IntegersOf() | IntegerSumsOf():
                slot = self.plan.slots[what.owner]
                layer: Any = self.module.get_submodule(slot.module)
                return constant_of(what, layer.weight, slot.args, qparams[slot.name])
            case StatisticOf() | ErrorSums():
                return value

    def __str__(self) -> str:
        if self.how is None:
            return f"    the given graph:\n{self.graph_module.code}"
        return (
            "    from inlay.testing import GeneratedModule, example_inputs, trace\n"
            f"    model = {self.module!r}\n"
            f"    graph_module = trace({self.how!r}, model, *example_inputs())"
        )

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text("…")  # Hypothesis repeats it after the message, which has it already


def constant_of(
    what: GraphInput, weight: torch.Tensor, args: QuantizationArgs, qparams: QParamsDict
) -> torch.Tensor:
    """Return what an input stands for that passes put in place of a weight."""
    if isinstance(what, WeightOf):
        return fold_weight(weight, args, qparams)
    scale = qparams["scale"]
    assert scale is not None
    integers = integer_weight(weight, scale, args)
    return column_sums(integers) if isinstance(what, IntegerSumsOf) else integers


def _scaled(model: nn.Module, linears: Mapping[str, nn.Linear]) -> EqualizedParameters:
    """Copies of weights in place of equalized ones, which are scaled by one."""
    equalized = EqualizedParameters(model)
    groups: dict[Group, torch.Tensor] = {}
    weights: dict[str, str] = {}
    for name, linear in linears.items():
        weight = equalized.name_of(linear.weight)
        if weight is not None and weight not in weights.values():
            group = Group(readers=(name,), producers=(), shape=(linear.in_features,))
            groups[group], weights[name] = torch.ones(linear.in_features), weight
    equalized.scale(groups, weights.__getitem__)
    return equalized


def graphs(
    tracers: Sequence[str] = TRACERS, recipe: Recipe = STATIC
) -> st.SearchStrategy[GraphCase]:
    """Graphs of generated models, by each of these tracers, and how to quantize them."""

    def of(how: str) -> st.SearchStrategy[GraphCase]:
        drawn = modules(PLAIN) if how == "symbolic_trace" else modules()
        return drawn.map(lambda module: GraphCase(module, how, example_inputs(), recipe))

    return st.one_of([of(how) for how in tracers])


class Snapshot:
    """What a graph module is at a time: its nodes, their metadata, its tensors and its code."""

    def __init__(self, gm: GraphModule) -> None:
        self.nodes = {node.name: _described(node) for node in gm.graph.nodes}
        self.order = [node.name for node in gm.graph.nodes]
        self.meta = {node.name: _meta(node.meta) for node in gm.graph.nodes}
        self.tensors = {
            name: tensor.detach().clone()
            for name, tensor in [*gm.named_parameters(), *gm.named_buffers()]
        }

    def difference(self, other: "Snapshot") -> str:
        """What differs, in a few words; nothing if nothing does."""
        for name in self.nodes.keys() - other.nodes.keys():
            return f"node {name} is gone"
        for name in other.nodes.keys() - self.nodes.keys():
            return f"node {name} is new"
        if self.order != other.order:
            return "nodes stand in another order"
        for name, described in self.nodes.items():
            if not _same(described, other.nodes[name]):
                return f"node {name} differs"
        for name, meta in self.meta.items():
            changed = [key for key in meta.keys() | other.meta[name].keys()
                       if not _same(meta.get(key), other.meta[name].get(key))]  # fmt: skip
            if changed:
                return f"the metadata {', '.join(sorted(map(str, changed)))} of {name} differs"
        for name, tensor in self.tensors.items():
            if name in other.tensors and not torch.equal(tensor, other.tensors[name]):
                return f"the values of {name} differ"
        return ""


def _described(node: Node) -> tuple[Any, ...]:
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: f"%{n.name}")
    return node.op, node.target, args, dict(kwargs)


def _meta(meta: Mapping[Any, Any]) -> dict[Any, Any]:
    """Metadata with its containers copied, so that a change in place shows."""
    return {
        key: value.copy() if isinstance(value, (dict, list, set)) else value
        for key, value in meta.items()
    }


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, torch.Tensor):
        return False  # another tensor
    return bool(one == other)
