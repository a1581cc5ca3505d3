"""Compile the graphs of a model: observing while calibrating, quantized afterwards."""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule

from inlay.errors import GraphError
from inlay.graph import (
    Pass,
    Pipeline,
    copy,
    fake_value,
    inputs_of,
    label_inputs,
    observes,
    slot_inputs,
    weight_use,
)
from inlay.nodes.observe import Observe
from inlay.passes import FINALIZE, PREPARE, InlineCalls, OutlineRepeats, PruneUnobserved
from inlay.ranges.kernels import keep_whole
from inlay.recipe import Slot
from inlay.statistics.by_slot import Statistics
from inlay.torch_private import allow_real_tensors, compiler_named, compiling_in, fake_mode_of

__all__ = ["Backend", "CompiledGraph", "GivenInput", "Variant", "compile_regions"]

Compiler = Callable[[GraphModule, Sequence[Any]], Callable[..., Any]]


class Backend:
    """What `torch.compile` calls with every graph of the model.

    It refers to the statistics weakly: compiled code lives as long as Dynamo likes, statistics as
    long as their calibration.
    """

    def __init__(
        self,
        statistics: Statistics,
        *,
        compiler: str,
        passes: Sequence[type[Pass]] = PREPARE,
        outputs: bool = True,
    ) -> None:
        self._statistics = weakref.ref(statistics, self._forget)
        self.compiler = compiler
        self.outputs = outputs
        self.passes = tuple(p for p in passes if p is not PruneUnobserved or not outputs)
        self.graphs: list[CompiledGraph] = []
        self.compilations = 0
        self.__name__ = "inlay"

    def _forget(self, _: object) -> None:
        """Let go of states and folded weights when their calibration is gone."""
        for graph in self.graphs:
            graph.unbind()

    @property
    def statistics(self) -> Statistics:
        statistics = self._statistics()
        if statistics is None:
            raise GraphError(
                "the calibration this model was compiled with is gone; keep it for as long as the "
                "compiled model is used"
            )
        return statistics

    def __call__(self, gm: GraphModule, example_inputs: Sequence[Any]) -> "CompiledGraph":
        graph = CompiledGraph(self, gm)
        graph.bind(example_inputs)  # compile now, while Dynamo is compiling
        self.graphs.append(graph)
        return graph

    def compile(self, gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        self.compilations += 1
        compiler = compiler_named(self.compiler)
        # A context of the inputs' own: Dynamo's has a newer fake mode, which refuses them.
        mode = fake_mode_of(*inputs)
        with compiling_in(mode), allow_real_tensors(mode), keep_whole():
            compiled: Callable[..., Any] = compiler(gm, list(inputs))
        return compiled


@dataclass(frozen=True)
class GivenInput:
    """An input that is not the model's: part of the state of slots, or a qparam of one."""

    key: str
    slots: tuple[Slot, ...]  # as they were traced
    observe: Observe | None
    device: torch.device

    def tensor(self, statistics: Statistics, names: dict[str, str]) -> torch.Tensor:
        """The tensor to pass, with modules renamed to those the graph is called for."""
        slots = [_renamed(slot, names) for slot in self.slots]
        if self.observe is None:
            return statistics.quantized_value(slots[0], self.key)
        return statistics.state(slots, self.observe, self.device).inputs()[self.key]


@dataclass(frozen=True)
class Variant:
    """A graph after its passes, compiled for one way of quantizing the modules in it."""

    graph_module: GraphModule  # before it was cut into regions
    run: Callable[..., Any]
    modules: tuple[str | None, ...]  # whose weights it was made with
    inputs: tuple[GivenInput, ...]


class CompiledGraph:
    """One graph of the model. Its slots are found by the weights it is called with."""

    def __init__(self, backend: Backend, gm: GraphModule) -> None:
        self.backend = backend
        # Weights are operands of calls until these are inlined.
        self.gm = gm = InlineCalls()(gm).graph_module
        self.num_outputs = _num_outputs(gm)
        uses = [weight_use(gm, node) for node in gm.graph.nodes]
        kinds = {use.weight_node: use.kind for use in uses if use is not None}
        self._weights = [
            (position, kinds[node])
            for position, node in enumerate(inputs_of(gm.graph))
            if node in kinds
        ]
        self.variants: dict[Any, Variant] = {}
        self._bound: dict[Any, tuple[Callable[..., Any], list[torch.Tensor]]] = {}

    def __call__(self, *args: Any) -> Any:
        run, tensors = self.bind(args)
        results = run(*args, *tensors)
        return results if self.backend.outputs else (None,) * self.num_outputs

    def unbind(self) -> None:
        self._bound.clear()

    def bind(self, args: Sequence[Any]) -> tuple[Callable[..., Any], list[torch.Tensor]]:
        """The compiled graph for these weights, and the states or qparams of their slots."""
        statistics = self.backend.statistics
        key = (statistics.is_final, *(id(args[position]) for position, _ in self._weights))
        bound = self._bound.get(key)
        if bound is None:
            modules = tuple(statistics.plan.owner(args[p], kind) for p, kind in self._weights)
            variant = self._variant(statistics, modules, args)
            names = _renaming(variant.modules, modules)
            tensors = [given.tensor(statistics, names) for given in variant.inputs]
            bound = self._bound[key] = (variant.run, tensors)
        return bound

    def _variant(
        self, statistics: Statistics, modules: tuple[str | None, ...], args: Sequence[Any]
    ) -> Variant:
        key = (statistics.is_final, *(statistics.signature(module) for module in modules))
        if key not in self.variants:
            gm = label_inputs(self.gm, args)
            self.variants[key] = self._compile(statistics, gm, modules)
        return self.variants[key]

    def _compile(
        self, statistics: Statistics, gm: GraphModule, modules: tuple[str | None, ...]
    ) -> Variant:
        passes = self.backend.passes
        if statistics.is_final:
            observing = [p for p in passes if p not in (PruneUnobserved, OutlineRepeats)]
            passes = (*observing, *FINALIZE)
        # The graph is kept as it is before it is cut into regions, for people to read.
        whole = Pipeline.of(
            [p for p in passes if p is not OutlineRepeats],
            plan=statistics.plan,
            qparams=statistics.qparams,
        )
        prepared = whole(gm).graph_module
        cut = [OutlineRepeats()] if OutlineRepeats in self.backend.passes else []
        regions = Pipeline(cut)(prepared).graph_module
        run = compile_regions(regions, self.backend.compile)
        return Variant(prepared, run, modules, tuple(_given_inputs(prepared, statistics)))


def compile_regions(gm: GraphModule, compiler: Compiler) -> Callable[..., Any]:
    """Compile each distinct region of an outlined graph once, or a graph without any as it is."""
    if all(node.op in ("placeholder", "get_attr", "output") for node in gm.graph.nodes):
        return gm.forward  # nothing to compile
    regions = {str(n.target) for n in gm.graph.find_nodes(op="call_module")}
    regions = {name for name in regions if name.startswith("region_")}
    if not regions:
        return compiler(gm, [fake_value(node) for node in inputs_of(gm.graph)])
    outer = copy(gm)
    for name in sorted(regions):
        body = gm.get_submodule(name)
        assert isinstance(body, GraphModule)
        compiled = compiler(body, [fake_value(node) for node in inputs_of(body.graph)])
        delattr(outer, name)
        setattr(outer, name, compiled)
    return outer.forward


def _given_inputs(gm: GraphModule, statistics: Statistics) -> list["GivenInput"]:
    """The inputs that passes added, with the slots and the observer they belong to."""
    observers: dict[str, tuple[tuple[Slot, ...], Observe]] = {}
    for node in gm.graph.nodes:
        if isinstance(node.target, Observe):
            slots = observes(node)
            observers[slots[0].name] = (slots, node.target)
    result = []
    for node, what in slot_inputs(gm.graph).items():
        slots, observe = observers.get(what.slot, ((), None))
        slots = slots or (statistics.plan.slots[what.slot],)
        result.append(GivenInput(what.key, slots, observe, fake_value(node).device))
    return result


def _renaming(traced: tuple[str | None, ...], actual: tuple[str | None, ...]) -> dict[str, str]:
    return {
        old: new
        for old, new in zip(traced, actual, strict=True)
        if old is not None and new is not None
    }


def _renamed(slot: Slot, names: dict[str, str]) -> Slot:
    """The slot of the module that takes this one's place in the graph."""
    if slot.module in names:
        return Slot(names[slot.module], slot.base_name, slot.args)
    for old, new in names.items():  # an attention module is known by a weight inside it
        inside = old.removeprefix(f"{slot.module}.")
        if inside != old and new.endswith(f".{inside}"):
            return Slot(new.removesuffix(f".{inside}"), slot.base_name, slot.args)
    return slot


def _num_outputs(gm: GraphModule) -> int:
    (output,) = gm.graph.find_nodes(op="output")
    values = output.args[0]
    return len(values) if isinstance(values, (tuple, list)) else 1
