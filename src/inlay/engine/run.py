"""A run: a calibration together with the things it was made with."""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from inlay.calibration import Calibration
from inlay.engine.saving import save
from inlay.recipe import Recipe
from inlay.run_record import Record, Stages, model_name

__all__ = ["Run"]


class Run(Calibration):
    """A calibration that knows its tokenizer, its held-out data and how long its stages took.

    :param tokenizer: a tokenizer that `save` writes beside the checkpoint
    :param held_out: batches on which `save` compares the model before and after
    :param data: description of the data's source
    :param stages: the clock of the run, to which `save` adds
    :param options: options of `Calibration`
    """

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe,
        *,
        tokenizer: Any = None,
        held_out: Iterable[Any] = (),
        data: str = "",
        stages: Stages | None = None,
        **options: Any,
    ) -> None:
        super().__init__(model, recipe, **options)
        self.tokenizer = tokenizer
        self.held_out = list(held_out)
        self.data = data
        self.advice: tuple[str, ...] = ()
        self.stages = Stages() if stages is None else stages

    @property
    def record(self) -> Record:
        """The facts about the run so far."""
        seen = self.statistics.data_seen
        return Record(
            model=model_name(self.model),
            data=self.data,
            samples=seen.samples,
            tokens=seen.tokens,
            padding_tokens=seen.padding_tokens,
            stages=self.stages.as_tuple(),
            advice=self.advice,
        )

    @contextmanager
    def timing_batch(self) -> Iterator[None]:
        """Time a batch. One in which something was traced or compiled is a stage of its own."""
        self.stages.announce("calibrating")
        known, begin = self.graphs.compilations, time.perf_counter()
        yield
        name = "calibrating" if self.graphs.compilations == known else "tracing and compiling"
        self.stages.add(name, time.perf_counter() - begin)

    def save(
        self,
        folder: str | Path,
        *,
        overwrite: bool = False,
        max_shard_size: int | str = "5GB",
        report: bool = True,
    ) -> Path:
        """Write a folder as `Calibration.save` does, with the tokenizer and a full report."""
        return save(
            self,
            folder,
            overwrite=overwrite,
            max_shard_size=max_shard_size,
            report=report,
            tokenizer=self.tokenizer,
            held_out=self.held_out,
            record=self.record,
            stages=self.stages,
        )
