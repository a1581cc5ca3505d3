"""The backend that `torch.compile` calls with every graph of a model."""

import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch.fx import GraphModule

from inlay.calibration.bindings import Bindings
from inlay.calibration.compiled_graph import CompiledGraph, compile_bodies
from inlay.calibration.decision import Auto, Piece
from inlay.calibration.explain import dropout_in
from inlay.calibration.pipelines import Pipelines
from inlay.errors import GraphError
from inlay.graph import writes_to_inputs
from inlay.ranges.kernels import keep_whole
from inlay.statistics.value import Statistics
from inlay.torch_private import (
    allow_real_tensors,
    compiler_named,
    compiling_in,
    counting_guards_of_code,
    fake_mode_of,
    inductor_settings,
    lost_guards,
)

__all__ = ["AUTO", "Backend"]

AUTO = "auto"


class Backend:
    """Makes every graph of a model observe, or quantize once the calibration is finalized.

    It refers to statistics and weights weakly: compiled code lives as long as Dynamo likes, these
    as long as their calibration.

    :param compiler: a backend of Dynamo, or "auto"
    :param auto: decides what "auto" compiles, if that is the compiler
    """

    def __init__(
        self,
        bindings: Bindings,
        pipelines: Pipelines,
        *,
        compiler: str,
        auto: Auto | None = None,
    ) -> None:
        self._bindings = weakref.ref(bindings, self._forget)
        # Only Inductor fuses what stands around a kernel; others compute quantize-dequantize.
        self.pipelines = replace(pipelines, kernels=compiler == "inductor")
        self.compiler = compiler
        self._auto = auto
        self.graphs: list[CompiledGraph] = []
        self.compilations = 0
        # Takes the graph of a model around its blocks, and what it gives is run in its place.
        self.arrange: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None
        self.on_trace: Callable[[], None] | None = None  # called before a new graph runs
        self.root: str | None = None  # the name of the block that runs; None outside of blocks
        self.is_rehearsing = False  # whether blocks are traced and prepared, and do not run
        self._warned = False
        self.__name__ = "inlay"

    @contextmanager
    def inside(self, block: str) -> Iterator[None]:
        """Say which block runs meanwhile: one graph may serve blocks that share their weights."""
        before, self.root = self.root, block
        try:
            yield
        finally:
            self.root = before

    def _forget(self, _: object) -> None:
        """Let go of statistics and folded weights when their calibration is gone."""
        for graph in self.graphs:
            graph.unbind()

    @contextmanager
    def lent(self, bindings: Bindings, pipelines: Pipelines) -> Iterator[None]:
        """Run the graphs that are traced already for another purpose, eagerly, for a while."""
        own = self._bindings, self.pipelines, self.compiler
        self._bindings, self.compiler = weakref.ref(bindings), "eager"
        self.pipelines = replace(pipelines, kernels=False)
        try:
            yield
        finally:
            self._bindings, self.pipelines, self.compiler = own

    @property
    def pieces(self) -> list[Piece]:
        """What "auto" runs of the graphs of all backends of a calibration."""
        return [] if self._auto is None else self._auto.pieces

    def serves(self, pipelines: Pipelines) -> bool:
        """Whether graphs were run for a purpose."""
        return any(graph.serves(pipelines.purpose) for graph in self.graphs)

    def forget(self, pipelines: Pipelines) -> None:
        """Drop what graphs were turned into for a purpose, with the tensors they were run with."""
        for graph in self.graphs:
            graph.forget(pipelines.purpose)

    @property
    def bindings(self) -> Bindings:
        bindings = self._bindings()
        if bindings is None:
            raise GraphError(
                "the calibration this model was compiled with is gone; keep it for as long as the "
                "compiled model is used"
            )
        return bindings

    def __call__(self, gm: GraphModule, example_inputs: Sequence[Any]) -> CompiledGraph:
        if self.on_trace is not None:
            self.on_trace()
        return self._take(CompiledGraph(self, gm), example_inputs)

    def compile_block(self, gm: GraphModule, example_inputs: Sequence[Any]) -> CompiledGraph:
        """Make the graph of a block observe or quantize, which runs in the middle of another."""
        if writes_to_inputs(gm):
            raise GraphError("a block writes to what it is called with")
        return self._take(CompiledGraph(self, gm, is_body=True), example_inputs)

    def _take(self, graph: CompiledGraph, example_inputs: Sequence[Any]) -> CompiledGraph:
        self._warn_of_dropout(graph.gm)
        with graph.knowing_padding(example_inputs):
            graph.bind(example_inputs)  # compile now, while Dynamo is compiling
        self.graphs += [graph, *graph.bodies]
        return graph

    def _warn_of_dropout(self, gm: GraphModule) -> None:
        """Warn once if values are observed while dropout is active: it scales up what it keeps."""
        found = [] if self._warned or self.bindings.statistics.is_final else dropout_in(gm)
        if found:
            self._warned = True
            more = f" and {len(found) - 3} more" if len(found) > 3 else ""
            warnings.warn(
                f"{', '.join(found[:3])}{more}: dropout is active while values are observed, so "
                "ranges include activations that it scaled up. Call model.eval() before "
                "calibrating, unless the quantized model is to run in training mode",
                stacklevel=2,
            )

    def forget_graphs(self, count: int | None) -> None:
        """Forget the first graphs, or all of them, since they run no more."""
        del self.graphs[:count]

    def rewind(self, before: Mapping[str, Statistics] | None) -> None:
        """Forget what was observed since the statistics were these; None if nothing observes."""
        for graph in self.graphs:
            graph.unbind()
        if before is not None:
            self.bindings.statistics.rewind(before)

    def compile(self, gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile one graph with the compiler of the calibration, or as "auto" has decided."""
        if self.compiler != AUTO:
            return self._compile(self.compiler, gm, inputs)
        return self._piece(gm)

    def compile_around(self, gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Run what is around the blocks of a model eagerly, except for observers that are slow.

        A batch runs it once, and compiling it would take longer than compiling a block.
        """
        return self._piece(gm, is_around=True) if self.compiler == AUTO else gm.forward

    def _piece(self, gm: GraphModule, *, is_around: bool = False) -> Piece:
        def compile(chosen: GraphModule) -> Callable[..., Any]:
            return compile_bodies(chosen, self._compile_later)

        assert self._auto is not None
        return self._auto.piece(gm, compile, is_around=is_around)

    def _compile_later(self, gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile when Dynamo is done, and checks the sizes it knew to matter and no others.

        Code from Inductor's cache would not say which sizes it is right for.
        """
        mode = fake_mode_of(*inputs)
        known = lost_guards(mode)
        with counting_guards_of_code(mode), inductor_settings(fx_graph_cache=False):
            compiled = self._compile("inductor", gm, inputs)
        if lost_guards(mode) > known:
            raise GraphError("the code would be right for some sizes of the batch only")
        return compiled

    def _compile(self, compiler: str, gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        self.compilations += 1
        # The mode of the inputs themselves: Dynamo has a newer one, which refuses them.
        mode = fake_mode_of(*inputs)
        with compiling_in(mode), allow_real_tensors(mode), keep_whole():
            compiled: Callable[..., Any] = compiler_named(compiler)(gm, list(inputs))
        return compiled
