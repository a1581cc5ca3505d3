"""Calibrating a model on data, or quantizing it anew from saved statistics."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from torch import nn

from inlay.checkpoint.loading import require_full_precision
from inlay.engine.batches import read_batches
from inlay.engine.in_memory import InMemory
from inlay.engine.keeping import Keeper
from inlay.engine.run import Run
from inlay.ranks.identity import is_first
from inlay.ranks.together import together
from inlay.recipe import Recipe
from inlay.run_record import Stages, model_name
from inlay.statistics.on_disk import StoredStatistics

__all__ = ["calibrate", "requantize"]


@together()
def calibrate(
    model: nn.Module,
    recipe: Recipe,
    data: Any = None,
    *,
    tokenizer: Any = None,
    max_length: int = 2048,
    samples: int | None = None,
    batch_size: int = 1,
    held_out: int = 16,
    count_padding: bool = False,
    compiler: str = "auto",
    accept: Collection[str] = (),
    statistics: str | Path | None = None,
    resume: bool = False,
    progress: bool | None = None,
) -> Run:
    """Observe a model on data, then compute its scales and zero points.

    Under a process group, all processes call it, and all get the qparams of all the data. Rows that
    Inlay reads, from a file, a dataset or a list of texts that all processes have, are divided:
    each process takes every n-th batch of those that one process would make. Ready batches are the
    process's own. If one process fails, all raise an error that says which, and why.

    :param data: batches, texts, a `.txt` or `.jsonl` file or a dataset; see `inlay.data`. None
        if the recipe needs no data: weights alone, or activations quantized dynamically
    :param tokenizer: a tokenizer; needed only for data that is text
    :param max_length: tokens after which a text is cut
    :param samples: how many rows calibrate; all if not given
    :param held_out: how many rows after those are kept for comparing the model before and after
    :param count_padding: count positions that the attention mask leaves out
    :param compiler: see `Calibration`
    :param accept: see `Calibration.finalize`
    :param statistics: a folder that keeps the statistics while the run goes on
    :param resume: continue from the statistics in that folder
    :param progress: draw progress bars; by default if there is a terminal
    :return: the finalized calibration, ready for `save`
    """
    name = model_name(model)
    require_full_precision(getattr(model, "config", None), name)
    stages = Stages()
    with stages("reading data"):
        batches = read_batches(
            model,
            data,
            tokenizer=tokenizer,
            max_length=max_length,
            samples=samples,
            batch_size=batch_size,
            held_out=held_out,
        )
    keeper = Keeper(None if statistics is None else Path(statistics), name, recipe, batches)
    run = keeper.begin(
        model,
        recipe,
        resume,
        tokenizer=tokenizer,
        held_out=batches.held_out,
        data=batches.source,
        stages=stages,
        compiler=compiler,
        count_padding=count_padding,
        progress=progress,
    )
    InMemory(run, batches, keeper, accept=accept).work()
    return run


@together()
def requantize(
    model: nn.Module,
    recipe: Recipe,
    statistics: StoredStatistics,
    *,
    tokenizer: Any = None,
    accept: Collection[str] = (),
    progress: bool | None = None,
) -> Run:
    """Compute scales and zero points from saved statistics, without running the model.

    Under a process group, all processes call it with the same statistics, and each searches a part
    of the ranges.

    :param statistics: statistics of the same model, gathered for a recipe like this one
    :param tokenizer: a tokenizer to write beside the checkpoint
    :param accept: see `Calibration.finalize`; `other_weights` accepts statistics of another model
        with the same modules, such as the one that this model was fine-tuned from
    :param progress: draw progress bars; by default if there is a terminal
    :return: the finalized calibration, ready for `save`
    """
    run = Run.from_statistics(
        model,
        recipe,
        statistics,
        accept=accept,
        tokenizer=tokenizer,
        data=statistics.data,
        progress=progress,
    )
    assert isinstance(run, Run)
    if not is_first():
        run.forget_data()  # what all have counts once
    with run.stages("searching ranges"):
        run.finalize(accept=accept)
    return run
