"""The passage of batches through a model, one region at a time."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from inlay.calibration.compiled_graph import RehearsedError
from inlay.calibration.phase import Phase
from inlay.calibration.tracing.blocks import block_modules
from inlay.calibration.tracing.running import running
from inlay.calibration.tracing.strategies import KeepsError, call
from inlay.checkpoint.stored_model import StoredModel
from inlay.data.batch import on_device_of, varying_sizes
from inlay.engine.driver import Region
from inlay.engine.run import Run
from inlay.engine.streamed.activations import Activations
from inlay.engine.streamed.stages import Started, Starting
from inlay.errors import ConfigurationError, GraphError
from inlay.ranks.together import look_around
from inlay.torch_private import graph_break_errors

__all__ = ["Passage"]


class Passage:
    """Traces batches without weights, and runs them through a model block by block.

    :param run: the calibration, whose batches run in stages
    :param stored: its model
    :param starting: hands over the batches that it starts
    :param batches: all batches that are to pass, by their numbers
    """

    def __init__(
        self, run: Run, stored: StoredModel, starting: Starting, batches: Mapping[int, Any]
    ) -> None:
        self._run, self._stored, self._starting = run, stored, starting
        varying = varying_sizes(list(batches.values()))
        self._batches = {
            number: on_device_of(run.model, batch, varying) for number, batch in batches.items()
        }
        inside = tuple(f"{name}." for name in block_modules(run.model))
        names = (name for name, _ in run.model.named_parameters())
        self._outside = {name for name in names if not name.startswith(inside)}  # of the blocks
        self._started: dict[int, Started] = {}
        # The same batches on their way through the equalized model, and which parameters outside of
        # the blocks were scaled when they started.
        self._started_equalized: dict[int, Started] = {}
        self._scaled_outside: set[str] | None = None

    def rehearse(self) -> Started:
        """Trace the first batch, and the first block with it, before any weight is read.

        :raises ConfigurationError: if the model cannot be cut at its blocks
        """
        first = next(iter(self._batches.values()))
        with self._refusing():
            started = self._start(first)
            before = self._stored.names_of(started.parameters(0))
            block = self._stored.names_of(started.graph.blocks[0].parameters())
            following = self._stored.names_of(started.parameters(1))
            with (
                self._run.graphs.rehearsing(),
                self._stored.pretended({*before, *block, *following}),
                running(),
                contextlib.suppress(RehearsedError),
            ):
                started.run(1, started.run(0, {}))
            # Statistics were wound back, so the batch has to find them anew.
            return self._start(first)

    def start(self) -> None:
        """Trace all batches, as far as their sizes ask for it. Nothing of them runs."""
        with self._refusing():
            self._started = {n: self._start(batch) for n, batch in self._batches.items()}
        blocks = [list(map(id, started.graph.blocks)) for started in self._started.values()]
        if any(each != blocks[0] for each in blocks):
            raise ConfigurationError(
                "the model cannot be streamed: some batches run through other blocks than others; "
                "calibrate it in memory"
            )

    def through(self, region: Region, activations: Activations) -> Iterator[int]:
        """Run all batches through a region whose parameters are loaded; yield after each."""
        yield from self._run_through(region, activations, self._started, equalized=False)

    def through_equalized(
        self, region: Region, activations: Activations, outside: set[str]
    ) -> Iterator[int]:
        """Run all batches through a region once more, which is equalized by now; yield after each.

        They run on from what the equalized regions before it gave, as in a second run over the data
        with the model in memory: scaled weights round otherwise.

        :param outside: names of the parameters outside of the blocks that are scaled by now
        """
        with self._run.graphs.running(Phase.OBSERVE_EQUALIZED):
            if self._scaled_outside != outside:
                self._start_equalized(outside)
            started = self._started_equalized
            yield from self._run_through(region, activations, started, equalized=True)
        if all(region.stage == len(each.graph.stages) - 1 for each in started.values()):
            self._started_equalized = {}  # they hold the copies

    def _start_equalized(self, outside: set[str]) -> None:
        """Start the batches with the scaled parameters outside of the blocks, which are copied."""
        absent = outside - self._stored.loaded
        self._stored.load(absent, mapped=True)
        with self._refusing():
            self._started_equalized = {n: self._start(b) for n, b in self._batches.items()}
        self._stored.release(absent)
        self._scaled_outside = outside

    def _run_through(
        self,
        region: Region,
        activations: Activations,
        batches: Mapping[int, Started],
        *,
        equalized: bool,
    ) -> Iterator[int]:
        stage = region.stage
        assert stage is not None
        for number, started in batches.items():
            look_around()
            with self._run.timing_batch():
                with running():
                    values = started.run(stage, activations.of(number, stage, equalized=equalized))
                if stage + 1 < len(started.graph.stages):
                    activations.keep(number, stage + 1, values, started, equalized=equalized)
            yield number

    def _start(self, batch: Any) -> Started:
        # What is compiled of the graph around the blocks relies on the layout of its parameters.
        with self._stored.pretended(self._outside - self._stored.loaded):
            return self._starting.start(lambda: call(self._run.observe, batch))

    @contextlib.contextmanager
    def _refusing(self) -> Iterator[None]:
        """Turn what keeps a model from being traced into an error that says what to do."""
        resisting: tuple[type[Exception], ...] = (*graph_break_errors(), KeepsError, GraphError)
        try:
            yield
        except resisting as error:
            reason = str(error).strip().split("\n")[0]
            raise ConfigurationError(
                f"{type(self._run.model).__name__} cannot be streamed, because its graph cannot be "
                f"cut at its blocks: {reason}. Calibrate it in memory, without streaming"
            ) from error
