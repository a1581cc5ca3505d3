"""What `torch.compile` calls with every graph of a model, and how a graph is compiled."""

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch.fx import GraphModule

from inlay.calibration.compiled_graph import CompiledGraph, compile_bodies
from inlay.calibration.decision import Piece
from inlay.errors import GraphError
from inlay.graph import writes_to_inputs
from inlay.ranges.kernels import keep_whole
from inlay.torch_private import (
    allow_real_tensors,
    compiler_named,
    compiling_in,
    counting_guards_of_code,
    fake_mode_of,
    inductor_settings,
    lost_guards,
)

if TYPE_CHECKING:
    from inlay.calibration.graph_store import GraphStore

__all__ = ["AUTO", "Backend"]

AUTO = "auto"


class Backend:
    """Hands every graph of a model to the store of a calibration, and compiles it.

    It refers to the store weakly: compiled code lives as long as Dynamo likes, statistics and
    weights as long as their calibration.

    :param keeps_outputs: whether graphs that observe return what the model does
    :param compiler: a backend of Dynamo, or "auto"
    """

    def __init__(self, store: "GraphStore", *, keeps_outputs: bool, compiler: str) -> None:
        self._store = weakref.ref(store)
        self._keeps_outputs, self._compiler = keeps_outputs, compiler
        self.__name__ = "inlay"

    @property
    def store(self) -> "GraphStore":
        store = self._store()
        if store is None:
            raise GraphError(
                "the calibration this model was compiled with is gone; keep it for as long as the "
                "compiled model is used"
            )
        return store

    @property
    def keeps_outputs(self) -> bool:
        """Whether graphs return what the model does, in the phase of the store."""
        return self._keeps_outputs or not self.store.phase.observes

    @property
    def uses_kernels(self) -> bool:
        """Whether graphs that quantize multiply integers where they can."""
        # Inductor fuses what stands around a kernel. A rerun wants the outputs alone, and there a
        # kernel is faster eagerly too. Other compilers compute quantize-dequantize.
        return self._compiler == "inductor" or self.store.is_rerun

    def __call__(self, gm: GraphModule, example_inputs: Sequence[Any]) -> CompiledGraph:
        self.store.note_trace()
        return self.store.take(CompiledGraph(self, gm), example_inputs)

    def compile_block(self, gm: GraphModule, example_inputs: Sequence[Any]) -> CompiledGraph:
        """Make the graph of a block observe or quantize, which runs in the middle of another."""
        if writes_to_inputs(gm):
            raise GraphError("a block writes to what it is called with")
        return self.store.take(CompiledGraph(self, gm, is_body=True), example_inputs)

    def compile(self, gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile one graph with the compiler of the calibration, or as "auto" has decided."""
        if self.store.is_rerun:
            return self._compile("eager", gm, inputs)
        return self._piece(gm) if self._is_auto else self._compile(self._compiler, gm, inputs)

    def compile_around(self, gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Run what is around the blocks of a model eagerly, except for observers that are slow.

        A batch runs it once, and compiling it would take longer than compiling a block.
        """
        return self._piece(gm, is_around=True) if self._is_auto else gm.forward

    @property
    def _is_auto(self) -> bool:
        return self._compiler == AUTO and not self.store.is_rerun

    def _piece(self, gm: GraphModule, *, is_around: bool = False) -> Piece:
        def compile(chosen: GraphModule) -> Callable[..., Any]:
            return compile_bodies(chosen, self._compile_later)

        return self.store.auto.piece(gm, compile, is_around=is_around)

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
        self.store.compiler_calls += 1
        # The mode of the inputs themselves: Dynamo has a newer one, which refuses them.
        mode = fake_mode_of(*inputs)
        with compiling_in(mode), allow_real_tensors(mode), keep_whole():
            compiled: Callable[..., Any] = compiler_named(compiler)(gm, list(inputs))
        return compiled
