"""The engine: what a run does with each region of a model, in memory or from disk."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from inlay.engine.run import Run
from inlay.observers import QParamsDict

__all__ = ["Engine", "Region"]


@dataclass(frozen=True, kw_only=True)
class Region:
    """A part of the model that is loaded, run, finalized, written and freed together.

    :param number: its place among the regions
    :param name: of the block, if it is one
    :param stage: the stage of a batch that runs here; None if no batch does
    :param runs: names of the parameters that the stage reads
    :param writes: names of the parameters that no later region reads
    """

    number: int
    name: str
    stage: int | None
    runs: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()

    @property
    def parameters(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.runs, *self.writes)))


class Engine(ABC):
    """Takes a model through a run, one region after another.

    In memory, the whole model is one region that is loaded already, and `Run.save` writes its
    weights. Streamed, the regions are blocks, read from disk.

    Over ranks, every rank takes its own batches through each region. The statistics are merged,
    and the work of finalizing and writing is divided.

    A step that needs the inputs that quantized blocks give would run between `finalize` and `free`:
    there the region is in memory, with its quantized weights.

    :param run: the calibration, with the clock of its stages
    """

    def __init__(self, run: Run) -> None:
        self.run = run

    @property
    @abstractmethod
    def regions(self) -> Sequence[Region]: ...

    def work(self, start: int = 0) -> None:
        """Take the regions from a number on through the run."""
        for region in self.regions[start:]:
            self.load(region)
            self.observe(region)
            self.write(region, self.finalize(region))
            self.free(region)

    @abstractmethod
    def load(self, region: Region) -> None:
        """Bring the parameters of a region into memory, if they are not."""

    @abstractmethod
    def observe(self, region: Region) -> None:
        """Run all batches of this rank through a region."""

    @abstractmethod
    def finalize(self, region: Region) -> Mapping[str, QParamsDict]:
        """Merge the statistics of all ranks, and take them through the steps of finalize."""

    @abstractmethod
    def write(self, region: Region, qparams: Mapping[str, QParamsDict]) -> None:
        """Write the results of a region, and record it as done in the journal."""

    @abstractmethod
    def free(self, region: Region) -> None:
        """Release the parameters that the next region does not need."""
