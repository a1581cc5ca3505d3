"""The backend that `torch.compile` calls with every graph of a model."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import GraphModule

from inlay.calibration.bindings import Bindings
from inlay.calibration.compiled_graph import CompiledGraph
from inlay.calibration.pipelines import Pipelines
from inlay.errors import GraphError
from inlay.ranges.kernels import keep_whole
from inlay.torch_private import allow_real_tensors, compiler_named, compiling_in, fake_mode_of

__all__ = ["Backend"]


class Backend:
    """Makes every graph of a model observe, or quantize once the calibration is finalized.

    It refers to statistics and weights weakly: compiled code lives as long as Dynamo likes, these
    as long as their calibration.
    """

    def __init__(self, bindings: Bindings, pipelines: Pipelines, *, compiler: str) -> None:
        self._bindings = weakref.ref(bindings, self._forget)
        self.pipelines = pipelines
        self.compiler = compiler
        self.graphs: list[CompiledGraph] = []
        self.compilations = 0
        self.__name__ = "inlay"

    def _forget(self, _: object) -> None:
        """Let go of statistics and folded weights when their calibration is gone."""
        for graph in self.graphs:
            graph.unbind()

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
        graph = CompiledGraph(self, gm, self.pipelines)
        graph.bind(example_inputs)  # compile now, while Dynamo is compiling
        self.graphs += [graph, *graph.regions]
        return graph

    def compile(self, gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile one region with the compiler of the calibration."""
        self.compilations += 1
        # The mode of the inputs themselves: Dynamo has a newer one, which refuses them.
        mode = fake_mode_of(*inputs)
        with compiling_in(mode), allow_real_tensors(mode), keep_whole():
            compiled: Callable[..., Any] = compiler_named(self.compiler)(gm, list(inputs))
        return compiled
