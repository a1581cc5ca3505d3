"""A graph of the model after its passes, compiled, and called with what it observes into."""

import operator
import re
import weakref
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import GraphModule
from torch.fx.node import map_arg

from inlay.calibration.bindings import GivenInputs
from inlay.calibration.called_modules import CalledModules
from inlay.calibration.phase import Phase
from inlay.calibration.tracing.blocks import Block, BlockCall, call_block, is_block_call
from inlay.calibration.tracing.strategies import Dropped
from inlay.graph import (
    Lookup,
    PaddingMask,
    Source,
    calls_outlined,
    copy,
    equalizable,
    fake_value,
    inputs_of,
    label_inputs,
    repeated_graphs,
    tensor_of,
)
from inlay.nodes.call_body import CallBody
from inlay.padding.layouts import Layouts
from inlay.passes import InlineCalls, OutlineRepeats
from inlay.recipe import Plan

if TYPE_CHECKING:
    from inlay.calibration.backend import Backend
    from inlay.calibration.graph_store import GraphStore

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
    :param inputs: inputs beyond those of the model
    """

    graph_module: GraphModule
    run: Callable[..., Any]
    modules: tuple[str | None, ...]
    inputs: GivenInputs


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
        self._called = CalledModules(gm)
        named = ((_ARGUMENT.match(node.name), n) for n, node in enumerate(inputs_of(gm.graph)))
        self._arguments = {match.group(1): n for match, n in named if match is not None}
        self.variants: dict[Any, Variant] = {}
        bound: dict[Any, tuple[Callable[..., Any], list[Any]]] = {}
        self._bound = bound
        # Compiled code may outlive the calibration, whose tensors go with it.
        self._end = weakref.ref(backend.store, lambda _: bound.clear())

    @property
    def store(self) -> "GraphStore":
        return self.backend.store

    def __call__(self, *args: Any) -> Any:
        with self.knowing_padding(args):
            run, tensors = self.bind(args)
            if self.is_body and self.store.is_rehearsing:
                raise RehearsedError
            results = run(*args, *self._of_batch(tensors))
        if self._keeps_outputs:
            return results
        return tuple(Dropped() for _ in range(self.num_outputs))

    @property
    def _keeps_outputs(self) -> bool:
        # The next block reads what a block gives, whether or not the caller does.
        return self.is_body or self.backend.keeps_outputs

    def knowing_padding(self, args: Sequence[Any]) -> AbstractContextManager[None]:
        """Find the padding of a batch in what the graph is called with, unless it is known."""
        bindings = self.store.bindings
        is_known = bindings.padding.is_known or self.store.count_padding or self.is_body
        if is_known or not self.store.phase.observes:
            return nullcontext()
        given = {name: args[position] for name, position in self._arguments.items()}
        observes = bindings.statistics.plan.observes_in(self.modules(args))
        return bindings.padding.of_graph(given, observes=observes)

    def _of_batch(self, tensors: list[Any]) -> list[Any]:
        """Put the masks of the batch that runs in their places."""
        padding = self.store.bindings.padding.current
        if padding is None:
            return tensors
        return [padding.mask(t) if isinstance(t, PaddingMask) else t for t in tensors]

    @property
    def _layouts(self) -> Layouts | None:
        """Where values have the tokens of this batch, if padding is left out of something."""
        padding, phase = self.store.bindings.padding.current, self.store.phase
        is_needed = phase.observes or phase is Phase.COMPARE
        return padding.layouts if padding is not None and is_needed else None

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
            observes = block.observes(self._plan)
            call.target = CallBody(run, observes=observes)
            call.args = (args, kwargs)

    def unbind(self) -> None:
        """Let go of statistics and folded weights."""
        self._bound.clear()

    def serves(self, phase: Phase) -> bool:
        """Return whether the graph was prepared for a phase."""
        return any(key[0] is phase for key in self.variants)

    def forget(self, phases: Collection[Phase]) -> None:
        """Drop the compiled variants for these phases."""
        self.unbind()
        self.variants = {key: v for key, v in self.variants.items() if key[0] not in phases}

    def bind(self, args: Sequence[Any]) -> tuple[Callable[..., Any], list[Any]]:
        """The compiled graph for these weights, and the statistics or qparams of their slots."""
        bindings, phase, root = self.store.bindings, self.store.phase, self.store.root
        # Layouts live as long as the calibration.
        key = (phase, root, id(self._layouts), *self._called.key(self._plan, args))
        bound = self._bound.get(key)
        if bound is None:
            modules = self.modules(args)
            quantized = self._called.quantized(self._plan, args, root)
            bindings.statistics.unrecognised.update(quantized - set(modules))
            variant = self._variant(modules, args)
            names = _renaming(variant.modules, modules)
            tensors = variant.inputs.resolve(bindings, names, args)
            bound = self._bound[key] = (variant.run, tensors)
            found = equalizable(variant.graph_module)
            if found is not None:
                bindings.equalization.take_in(found, _lookup(variant.graph_module, args))
        return bound

    def _variant(self, modules: tuple[str | None, ...], args: Sequence[Any]) -> Variant:
        bindings, phase = self.store.bindings, self.store.phase
        statistics = bindings.statistics
        key: tuple[Any, ...] = phase, *map(statistics.signature, modules)
        if self._layouts is not None:
            slots = map(statistics.plan.slots_at, modules)
            key = (*key, self._layouts.masked, *map(self._layouts.signature, slots))
        if phase not in (Phase.OBSERVE, Phase.PLAIN):
            key = (*key, *map(bindings.weights.equalized.is_changed, args))
        if key not in self.variants:
            gm = label_inputs(self.gm, args, self.store.root)
            self._bind_bodies(gm, args)
            self.variants[key] = self._compile(gm, modules)
        return self.variants[key]

    def _bind_bodies(self, gm: GraphModule, args: Sequence[Any]) -> None:
        """Prepare bodies for the weights of their calls, and note which of them observe."""
        plan = self._plan
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

    @property
    def _plan(self) -> Plan:
        return self.store.bindings.statistics.plan

    def modules(self, args: Sequence[Any]) -> tuple[str | None, ...]:
        """Return the modules whose weights are among the arguments."""
        return self._called.with_weights(self._plan, args, self.store.root)

    def _compile(self, gm: GraphModule, modules: tuple[str | None, ...]) -> Variant:
        bindings = self.store.bindings
        pipeline = self.store.pipeline(
            self._layouts, outputs=self._keeps_outputs, kernels=self.backend.uses_kernels
        )
        # The whole graph is kept for people to read; outlined bodies are for the compiler.
        with bindings.padding.noting_problems():
            prepared = pipeline(gm).graph_module
        outlined = OutlineRepeats()(prepared).graph_module
        is_around = any(map(is_block_call, prepared.graph.nodes))
        compiler = self.backend.compile_around if is_around else self.backend.compile
        run = compile_bodies(outlined, compiler)
        if self.store.arrange is not None and not self.is_body:
            run = self.store.arrange(run)
        return Variant(prepared, run, modules, GivenInputs.of(prepared, bindings))


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
