"""Rerun the traced graphs of a calibration for what they return."""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from inlay.calibration.bindings import Bindings
from inlay.calibration.phase import Phase
from inlay.calibration.tracing.strategies import call
from inlay.errors import GraphError

if TYPE_CHECKING:
    from inlay.calibration.graph_store import GraphStore

__all__ = ["Rerun"]


@dataclass(frozen=True)
class Rerun:
    """Runs traced graphs eagerly in other phases. Batches of observed sizes are not traced again.

    :param bindings: qparams, folded weights, and sums of the errors of layers
    """

    store: "GraphStore"
    bindings: Bindings

    def running(self, phase: Phase) -> AbstractContextManager[None]:
        """Have the graphs that run meanwhile prepared for a phase."""
        return self.store.running(phase, self.bindings)

    def run(self, batch: Any) -> Any:
        """Run a batch in the phase that graphs are in."""
        return call(self.store.run, batch)

    def outputs(self, batch: Any, phase: Phase) -> Any:
        """Return the outputs of the model: quantized in the phase QUANTIZE, plain in the others."""
        with self.running(phase):
            outputs = self.run(batch)
        # If Dynamo is turned off the plain model runs, and nothing would seem to have changed.
        if not self.store.serves(phase):
            raise GraphError(
                "cannot run the quantized model because torch.compile is turned off; unset "
                "TORCHDYNAMO_DISABLE and leave torch.compiler's stance alone"
            )
        return outputs

    def let_go_of_blocks(self) -> None:
        """Drop folded and equalized weights of blocks; they are made again when needed."""
        for graph in self.store:
            if graph.is_body:
                graph.unbind()
        self.bindings.weights.forget_folded()
        self.bindings.weights.equalized.forget_copies()
