"""Run batches through the graphs of a finalized calibration, for their outputs."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from inlay.calibration.backend import Backend
from inlay.calibration.bindings import Bindings
from inlay.calibration.pipelines import Pipelines
from inlay.errors import GraphError

__all__ = ["Rerun"]


@dataclass(frozen=True, kw_only=True)
class Rerun:
    """The model as it was traced for its statistics, run op by op for what it returns.

    Nothing is traced again for batches of the sizes that were observed.

    :param run: runs a batch through the graphs of the backends
    :param bindings: qparams, folded weights, and sums of the errors of layers
    """

    run: Callable[[Any], Any]
    backends: Sequence[Backend]
    bindings: Bindings
    pipelines: Pipelines

    def quantized(self, batch: Any) -> Any:
        """The outputs of the quantized model."""
        return self._outputs(batch, self.pipelines)

    def comparing_layers(self, batch: Any) -> Any:
        """The outputs of the plain model, while its layers are compared with quantized ones."""
        return self._outputs(batch, self._comparing)

    @contextmanager
    def running(self, *, quantized: bool = False, compare_layers: bool = False) -> Iterator[None]:
        """Have the graphs that run meanwhile give the outputs of one model or the other.

        :param quantized: those of the quantized model
        :param compare_layers: compare the layers of the plain model on the way
        """
        plain = not (quantized or compare_layers)
        pipelines = replace(self.pipelines, plain=plain, compare_layers=compare_layers)
        with self._lent(pipelines):
            yield

    def let_go_of_blocks(self) -> None:
        """Drop the folded weights of blocks; they are folded again when they are needed."""
        for backend in self.backends:
            for graph in backend.graphs:
                if graph.is_region:
                    graph.unbind()
        self.bindings.weights.forget_folded()

    def forget(self) -> None:
        """Drop the graphs that were made for this, and what they hold."""
        plain = replace(self.pipelines, plain=True)
        for backend in self.backends:
            for pipelines in (self.pipelines, self._comparing, plain):
                backend.forget(pipelines)

    @property
    def _comparing(self) -> Pipelines:
        return replace(self.pipelines, compare_layers=True)

    @contextmanager
    def _lent(self, pipelines: Pipelines) -> Iterator[None]:
        with ExitStack() as stack:
            for backend in self.backends:
                stack.enter_context(backend.lent(self.bindings, pipelines))
            yield

    def _outputs(self, batch: Any, pipelines: Pipelines) -> Any:
        with self._lent(pipelines):
            outputs = self.run(batch)
        # If Dynamo is turned off the plain model runs, and nothing would seem to have changed.
        if not any(backend.serves(pipelines) for backend in self.backends):
            raise GraphError(
                "cannot run the quantized model because torch.compile is turned off; unset "
                "TORCHDYNAMO_DISABLE and leave torch.compiler's stance alone"
            )
        return outputs
