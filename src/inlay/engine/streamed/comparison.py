"""Comparing a model on disk with its quantized self, in a second pass over its blocks."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

from inlay.calibration.phase import Phase
from inlay.calibration.rerun import Rerun
from inlay.calibration.tracing.blocks import block_modules
from inlay.calibration.tracing.running import running
from inlay.engine.driver import Region
from inlay.engine.streamed.activations import Activations
from inlay.engine.streamed.regions import Regions, segments_of
from inlay.engine.streamed.stages import Started, Starting
from inlay.engine.streamed.streaming import Streaming
from inlay.evaluation.compare import LAYER_BATCHES, Batch, Finished
from inlay.memory import return_freed_memory
from inlay.progress import watched
from inlay.recipe import Plan

__all__ = ["PassingBlocks"]


class PassingBlocks:
    """Runs held-out batches through both models side by side, with one block of them in memory.

    :param engine: of the model, whose batches run in stages
    """

    def __init__(self, engine: Streaming) -> None:
        self._run, self._stored, self.starting = engine.run, engine.stored, engine.starting
        self._folder = engine.journal.folder / "comparing"  # for values between blocks
        self._offload = engine.options.offload_activations

    def __call__(self, rerun: Rerun, batches: Sequence[Batch]) -> Iterator[tuple[Plan, Finished]]:
        """Pass the batches through the model, as `compare` asks for."""
        pairs = self._started(rerun, batches)
        # The outputs ask for more of the model than statistics do, so it is cut elsewhere.
        segments = segments_of(self._stored, pairs[0].plain)
        regions = Regions(self._stored, segments, self._run.plan)
        shown = watched(regions, "comparing", show=self._run.show_progress)
        for region in shown:
            regions.load(region)
            plan = regions.plan_of(region)
            yield plan, self._finished(region, pairs)
            rerun.let_go_of_blocks()
            self._stored.release(region.parameters)
            return_freed_memory()  # kept by batches, in pieces that the next block cannot use

    def _finished(self, region: Region, pairs: Sequence["_Pair"]) -> Finished:
        for pair in pairs if region.stage is not None else ():
            pair.run(region)
            if pair.is_done:
                yield pair.batch, *pair.outputs(self.starting)

    def _started(self, rerun: Rerun, batches: Sequence[Any]) -> "list[_Pair]":
        # Parameters outside of the blocks are folded or equalized when a batch starts.
        blocks = tuple(f"{name}." for name in block_modules(self._run.model))
        modules = self._run.model.named_modules(remove_duplicate=False)
        equalized = self._run.equalization.parameters
        changing = [
            parameter
            for name, module in modules
            if not name.startswith(blocks)
            for parameter in module.parameters(recurse=False)
            if self._run.plan.of_module(name) or equalized.is_changed(parameter)
        ]
        outside = self._stored.names_of(changing)
        self._stored.load(outside, mapped=True)
        pairs = [_Pair(self, rerun, number, batch) for number, batch in enumerate(batches)]
        self._stored.release(outside)
        return pairs

    def activations(self, name: str) -> Activations:
        """A place for the values of one batch of one model."""
        return Activations(self._folder / name, in_memory=not self._offload, on_disk=self._offload)


class _Pair:
    """A batch on its way through the plain model and the quantized one."""

    def __init__(self, passing: PassingBlocks, rerun: Rerun, number: int, batch: Batch) -> None:
        self.batch, self._rerun = batch, rerun
        self._compares_layers = number < LAYER_BATCHES
        self._sides: dict[bool, tuple[Started, Activations]] = {}
        self._results: dict[bool, Any] = {}
        for quantized in (False, True):
            with self._running(quantized):
                started = passing.starting.start(lambda: rerun.run(batch))
            self._sides[quantized] = (
                started,
                passing.activations(f"{number:06d}-{'quantized' if quantized else 'plain'}"),
            )

    @property
    def plain(self) -> Started:
        return self._sides[False][0]

    def run(self, region: Region) -> None:
        stage = region.stage
        assert stage is not None
        for quantized, (started, activations) in self._sides.items():
            with self._running(quantized), running():
                values = started.run(stage, activations.of(0, stage))
            if stage + 1 < len(started.graph.stages):
                activations.keep(0, stage + 1, values, started)
                activations.drop(stage)
            else:
                self._results[quantized] = values["output"]

    @property
    def is_done(self) -> bool:
        """Whether the batch has run through all of both models."""
        return len(self._results) == len(self._sides)

    def outputs(self, starting: Starting) -> tuple[Any, Any]:
        """What the plain model and the quantized one return."""
        found = []
        for quantized in (False, True):
            with self._running(quantized):
                results = self._results.pop(quantized)
                found.append(starting.finish(lambda: self._rerun.run(self.batch), results))
        return found[0], found[1]

    def _running(self, quantized: bool) -> AbstractContextManager[None]:
        plain = Phase.COMPARE if self._compares_layers else Phase.PLAIN
        return self._rerun.running(Phase.QUANTIZE if quantized else plain)
