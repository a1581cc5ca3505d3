"""Calibrating a model on data, or quantizing it anew from saved statistics."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from torch import nn
from typing_extensions import Unpack

from inlay.checkpoint.loading import require_full_precision, require_in_memory
from inlay.engine.batches import read_batches
from inlay.engine.in_memory import InMemory
from inlay.engine.keeping import Keeper
from inlay.engine.run import Run
from inlay.options import Options, RunKeywords
from inlay.ranks.identity import is_first
from inlay.ranks.together import together
from inlay.recipe import Recipe
from inlay.run_record import Stages, model_name
from inlay.statistics.on_disk import StoredStatistics

__all__ = ["calibrate", "requantize"]


@together()
def calibrate(
    model: nn.Module,
    recipe: Recipe | str,
    data: Any = None,
    *,
    tokenizer: Any = None,
    processor: Any = None,
    statistics: str | Path | None = None,
    **keywords: Unpack[RunKeywords],
) -> Run:
    """Observe a model on data, then compute its scales and zero points.

    Under a process group, all processes call it, and all get the qparams of all the data. Rows that
    Inlay reads, from a file, a dataset or a list of texts that all processes have, are divided:
    each process takes every n-th batch of those that one process would make. Ready batches are the
    process's own. If one process fails, all raise an error that says which, and why.

    :param recipe: a recipe, or the name of a preset. A name stands for the best method, as on the
        command line; `Recipe.from_preset(name)` keeps the defaults of llm-compressor
    :param data: batches, texts, a `.txt` or `.jsonl` file or a dataset; see `inlay.data`. None
        if the recipe needs no data: weights alone, or activations quantized dynamically
    :param tokenizer: a tokenizer; needed only for data that is text
    :param processor: a processor, which takes the place of the tokenizer; needed for images
    :param statistics: a folder that keeps the statistics while the run goes on
    :param keywords: the fields of `inlay.options.Options`; `accept` as in `Calibration.finalize`
    :return: the finalized calibration, ready for `save`
    """
    options = Options(**keywords)
    tokenizer = processor or tokenizer
    recipe = Recipe.of(recipe, model, has_data=data is not None)
    name = model_name(model)
    require_full_precision(getattr(model, "config", None), name)
    require_in_memory(model)
    stages = Stages()
    with stages("reading data"):
        batches = read_batches(model, data, tokenizer, options)
    keeper = Keeper(None if statistics is None else Path(statistics), name, recipe, batches)
    run = keeper.begin(
        model,
        recipe,
        options.resume,
        tokenizer=tokenizer,
        held_out=batches.held_out,
        data=batches.source,
        stages=stages,
        compiler=options.compiler,
        count_padding=options.count_padding,
        progress=options.progress,
    )
    InMemory(run, batches, keeper, accept=options.accept).work()
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
        run.statistics.forget_stored()  # statistics that all ranks have count once
    with run.stages("searching ranges"):
        run.finalize(accept=accept)
    return run
