"""A graph of the model after its passes, compiled, and called with what it observes into."""

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from inlay.calibration.bindings import Bindings, GivenInput, given_inputs
from inlay.calibration.blocks import Block, BlockCall, call_block, is_block_call
from inlay.calibration.pipelines import Pipelines, Purpose
from inlay.calibration.tracing import Dropped
from inlay.graph import (
    Lookup,
    PaddingMask,
    Pipeline,
    Source,
    called_path,
    calls_outlined,
    copy,
    equalizable,
    fake_value,
    inputs_of,
    label_inputs,
    parameter_reads,
    repeated_graphs,
    tensor_of,
    weight_use,
)
from inlay.nodes.call_body import CallBody
from inlay.padding.layouts import Layouts
from inlay.passes import InlineCalls
from inlay.recipe import Locate

if TYPE_CHECKING:
    from inlay.calibration.backend import Backend

__all__ = ["CompiledGraph", "RehearsedError", "Variant", "compile_bodies"]

# Dynamo prefixes an argument's name with the variable and appends an underscore.
_ARGUMENT = re.compile(r"[lL]_(?:kwargs_)?(\w+)_$")
Compiler = Callable[[GraphModule, Sequence[Any]], Callable[..., Any]]


class RehearsedError(Exception):
    """A block was traced and prepared, and was not to run."""


@dataclass(frozen=True)
class Variant:
    """A graph after its passes, compiled for one way of quantizing the modules in it.

    :param graph_module: before its repeats were outlined
    :param modules: whose weights it was made with
    :param inputs: what it takes after the inputs of the model
    """

    graph_module: GraphModule
    run: Callable[..., Any]
    modules: tuple[str | None, ...]
    inputs: tuple[GivenInput, ...]


class CompiledGraph:
    """One graph of the model. Its slots are found by the weights it is called with.

    A graph that it calls more than once is prepared once, as a graph of its own.

    :param is_body: whether another graph calls this one
    :param bodies: the graphs that this one calls more than once
    """

    def __init__(self, backend: "Backend", gm: GraphModule, *, is_body: bool = False) -> None:
        self.backend, self.is_body = backend, is_body
        self.bodies: list[CompiledGraph] = []
        # Weights are operands of calls until these are inlined.
        self.gm = gm = InlineCalls()(self._with_bodies(gm)).graph_module
        self.num_outputs = _num_outputs(gm)
        inputs = {node: position for position, node in enumerate(inputs_of(gm.graph))}
        uses = ((weight_use(gm, node), called_path(node)) for node in gm.graph.nodes)
        found = [(use, path) for use, path in uses if use is not None and use.weight_node in inputs]
        # Modules that share a weight share an input: each use has a module of its own.
        self._weights = list(
            dict.fromkeys(
                (inputs[use.weight_node], use.kind, path) for use, path in found if use.weight_node
            )
        )
        self._reads = [
            (path, inputs[value])
            for path, value in parameter_reads(gm)
            if isinstance(value, Node) and value in inputs
        ]
        self._paths = list(dict.fromkeys(filter(None, map(called_path, gm.graph.nodes))))
        self._parameters: list[int] | None = None  # positions; found with the first call
        named = ((_ARGUMENT.match(node.name), n) for n, node in enumerate(inputs_of(gm.graph)))
        self._arguments = {match.group(1): n for match, n in named if match is not None}
        self.variants: dict[Any, Variant] = {}
        self._bound: dict[Any, tuple[Callable[..., Any], list[Any]]] = {}

    def __call__(self, *args: Any) -> Any:
        with self.knowing_padding(args):
            run, tensors = self.bind(args)
            if self.is_body and self.backend.is_rehearsing:
                raise RehearsedError
            results = run(*args, *self._of_batch(tensors))
        wanted = self.is_body or self.backend.pipelines.outputs
        return results if wanted else tuple(Dropped() for _ in range(self.num_outputs))

    def knowing_padding(self, args: Sequence[Any]) -> AbstractContextManager[None]:
        """Find the padding of a batch in what the graph is called with, unless it is known."""
        bindings, pipelines = self.backend.bindings, self.backend.pipelines
        is_known = bindings.padding.is_known or pipelines.count_padding or self.is_body
        if is_known or bindings.statistics.is_final:
            return nullcontext()
        given = {name: args[position] for name, position in self._arguments.items()}
        observes = bindings.statistics.plan.observes_in(self.modules(args))
        return bindings.padding.of_graph(given, observes=observes)

    def _of_batch(self, tensors: list[Any]) -> list[Any]:
        """Put the masks of the batch that runs in their places."""
        padding = self.backend.bindings.padding.current
        if padding is None:
            return tensors
        return [padding.mask(t) if isinstance(t, PaddingMask) else t for t in tensors]

    @property
    def _layouts(self) -> Layouts | None:
        """Where values have the tokens of this batch, if padding is left out of something."""
        bindings, pipelines = self.backend.bindings, self.backend.pipelines
        padding = bindings.padding.current
        is_needed = pipelines.compare_layers or not bindings.statistics.is_final
        return padding.layouts if padding is not None and is_needed else None

    @property
    def _pipelines(self) -> Pipelines:
        # The next block reads what a block gives, whether or not the caller does.
        pipelines = self.backend.pipelines
        return replace(pipelines, outputs=True) if self.is_body else pipelines

    def _with_bodies(self, gm: GraphModule) -> GraphModule:
        """Let blocks, and graphs that are called more than once, run as graphs of their own."""
        gm = copy(gm)
        self._call_blocks(gm)
        for repeated in repeated_graphs(gm):
            body = CompiledGraph(self.backend, repeated.body, is_body=True)
            self.bodies += [*body.bodies, body]
            for call in repeated.calls:
                with gm.graph.inserting_before(call):
                    own = gm.graph.call_function(CallBody(body), repeated.operands(call))
                own.meta = dict(call.meta)
                call.replace_all_uses_with(own)
                gm.graph.erase_node(call)
        gm.graph.eliminate_dead_code(lambda node: node.op != "get_attr")
        gm.recompile()
        return gm

    def _call_blocks(self, gm: GraphModule) -> None:
        for call in gm.graph.nodes:
            if call.target is not call_block:
                continue
            handle, args, kwargs = call.args
            block = Block.of(handle)
            given = map_arg([args, kwargs], fake_value)
            run = BlockCall.like(block, given, fake_value(call))
            observes = block.observes(self.backend.bindings.statistics.plan)
            call.target = CallBody(run, observes=observes)
            call.args = (args, kwargs)

    def unbind(self) -> None:
        """Let go of statistics and folded weights."""
        self._bound.clear()

    def serves(self, purpose: Purpose) -> bool:
        """Whether the graph was turned into something for a purpose."""
        return any(key[0] == purpose for key in self.variants)

    def forget(self, purpose: Purpose) -> None:
        """Drop what the graph was turned into for a purpose."""
        self.unbind()
        self.variants = {key: v for key, v in self.variants.items() if key[0] != purpose}

    def bind(self, args: Sequence[Any]) -> tuple[Callable[..., Any], list[Any]]:
        """The compiled graph for these weights, and the statistics or qparams of their slots."""
        bindings = self.backend.bindings
        statistics = bindings.statistics
        purpose = self.backend.pipelines.purpose
        parameters = (id(args[position]) for position in self._known_by(args))
        # Layouts live as long as the calibration.
        of_batch = id(self._layouts)
        key = (purpose, statistics.phase, self.backend.root, of_batch, *parameters)
        bound = self._bound.get(key)
        if bound is None:
            modules = self.modules(args)
            statistics.unrecognised.update(self._called(args) - set(modules))
            variant = self._variant(bindings, modules, args)
            names = _renaming(variant.modules, modules)
            observers: dict[str, Mapping[str, torch.Tensor]] = {}
            tensors = [given.tensor(bindings, names, args, observers) for given in variant.inputs]
            bound = self._bound[key] = (variant.run, tensors)
            found = equalizable(variant.graph_module)
            if found is not None:
                bindings.equalization.take_in(found, _lookup(variant.graph_module, args))
        return bound

    def _known_by(self, args: Sequence[Any]) -> list[int]:
        """Positions of the arguments that tell for which modules the graph is called."""
        plan = self.backend.bindings.statistics.plan
        if plan.recipe.equalize is None and not plan.shares_weights:
            return [position for position, _, _ in self._weights]
        # Equalization also scales norms and biases, and these tell modules with one weight apart.
        if self._parameters is None:
            self._parameters = [
                position for position, arg in enumerate(args) if isinstance(arg, nn.Parameter)
            ]
        return self._parameters

    def _variant(
        self, bindings: Bindings, modules: tuple[str | None, ...], args: Sequence[Any]
    ) -> Variant:
        statistics = bindings.statistics
        purpose = self.backend.pipelines.purpose
        key: tuple[Any, ...] = purpose, statistics.phase, *map(statistics.signature, modules)
        if self._layouts is not None:
            slots = map(statistics.plan.slots_at, modules)
            key = (*key, self._layouts.masked, *map(self._layouts.signature, slots))
        if statistics.is_final or statistics.is_second_run:
            key = (*key, *map(bindings.weights.equalized.is_changed, args))
        if key not in self.variants:
            gm = label_inputs(self.gm, args, self.backend.root)
            self._bind_bodies(gm, args)
            self.variants[key] = self._compile(bindings, gm, modules)
        return self.variants[key]

    def _bind_bodies(self, gm: GraphModule, args: Sequence[Any]) -> None:
        """Prepare bodies for the weights of their calls, and note which of them observe."""
        plan = self.backend.bindings.statistics.plan
        given = dict(zip(inputs_of(gm.graph), args, strict=True))
        for node in gm.graph.nodes:
            if not isinstance(node.target, CallBody):
                continue
            body = node.target.run
            if not isinstance(body, CompiledGraph):
                continue  # a block, which is prepared when it runs
            operands = [
                given.get(operand) if operand in given else tensor_of(gm, operand)
                for operand in node.args
            ]
            body.bind(operands)
            node.target = replace(node.target, observes=plan.observes_in(body.modules(operands)))

    def modules(self, args: Sequence[Any]) -> tuple[str | None, ...]:
        """The modules whose weights are among the arguments."""
        plan, located = self.backend.bindings.statistics.plan, self._locator(args)
        return tuple(
            plan.owner(args[position], kind, path and located(path))
            for position, kind, path in self._weights
        )

    def _called(self, args: Sequence[Any]) -> set[str]:
        """Return the quantized modules with a weight that ran, matched or not."""
        plan, located = self.backend.bindings.statistics.plan, self._locator(args)
        return {
            name
            for name in map(located, self._paths)
            if name in plan.kinds and plan.of_module(name)
        }

    def _locator(self, args: Sequence[Any]) -> Locate:
        reads = ((path, args[position]) for path, position in self._reads)
        tensors = ((path, arg) for path, arg in reads if isinstance(arg, torch.Tensor))
        return self.backend.bindings.statistics.plan.locator(tensors, self.backend.root)

    def _compile(
        self, bindings: Bindings, gm: GraphModule, modules: tuple[str | None, ...]
    ) -> Variant:
        pipelines, qparams = self._pipelines, bindings.statistics.qparams
        equalized, layouts = bindings.weights.equalized, self._layouts
        if pipelines.plain:
            whole = Pipeline(())
        elif qparams is not None:
            whole = pipelines.quantizing(qparams, equalized, layouts)
        elif bindings.statistics.is_second_run:
            whole = pipelines.observing_equalized(layouts, equalized)
        else:
            whole = pipelines.observing(layouts)
        # The whole graph is kept for people to read; outlined bodies are for the compiler.
        with bindings.padding.noting_problems():
            prepared = whole(gm).graph_module
        outlined = pipelines.cutting()(prepared).graph_module
        is_around = any(map(is_block_call, prepared.graph.nodes))
        compiler = self.backend.compile_around if is_around else self.backend.compile
        run = compile_bodies(outlined, compiler)
        if self.backend.arrange is not None and not self.is_body:
            run = self.backend.arrange(run)
        inputs = given_inputs(prepared, bindings)
        return Variant(prepared, run, modules, tuple(inputs))


def compile_bodies(gm: GraphModule, compiler: Compiler) -> Callable[..., Any]:
    """Compile each distinct body of an outlined graph once, or the graph if nothing is outlined."""
    if all(node.op in ("placeholder", "get_attr", "output") for node in gm.graph.nodes):
        return gm.forward  # nothing to compile
    bodies = {str(node.target) for node in gm.graph.nodes if calls_outlined(node)}
    if not bodies and any(isinstance(node.target, CallBody) for node in gm.graph.nodes):
        return gm.forward  # no compiler could look into the calls
    if not bodies:
        return compiler(gm, [fake_value(node) for node in inputs_of(gm.graph)])
    outer = copy(gm)
    for name in sorted(bodies):
        body = gm.get_submodule(name)
        assert isinstance(body, GraphModule)
        compiled = compiler(body, [fake_value(node) for node in inputs_of(body.graph)])
        delattr(outer, name)
        setattr(outer, name, compiled)
    return outer.forward


def _lookup(gm: GraphModule, args: Sequence[Any]) -> Lookup:
    """Finds the parameters that a graph is called with."""
    given = {node.name: value for node, value in zip(inputs_of(gm.graph), args, strict=False)}

    def lookup(source: Source) -> torch.Tensor | None:
        attribute = operator.attrgetter(source.name)
        value = given.get(source.name) if source.is_input else attribute(gm)
        return value if isinstance(value, torch.Tensor) else None

    return lookup


def _renaming(traced: tuple[str | None, ...], actual: tuple[str | None, ...]) -> dict[str, str]:
    return {
        old: new
        for old, new in zip(traced, actual, strict=True)
        if old is not None and new is not None
    }


def _num_outputs(gm: GraphModule) -> int:
    (output,) = gm.graph.find_nodes(op="output")
    values = output.args[0]
    return len(values) if isinstance(values, (tuple, list)) else 1
