"""Calibrating a model on data, or quantizing it anew from saved statistics."""

import time
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from inlay.calibration import Calibration
from inlay.checkpoint.loading import require_full_precision
from inlay.collectives import from_all_ranks
from inlay.data.batch import count_tokens, on_device_of, varying_sizes
from inlay.data.sources import Batches, batches_of
from inlay.engine.hessian_room import require_room_for_hessians
from inlay.engine.keeping import Keeper
from inlay.engine.run import Run
from inlay.engine.trace_check import check_trace
from inlay.errors import ConfigurationError, StatisticsError
from inlay.progress import Bar
from inlay.ranks.division import Part
from inlay.ranks.identity import is_first
from inlay.ranks.together import look_around, together
from inlay.recipe import Recipe
from inlay.run_record import Stages, model_name
from inlay.statistics.data_seen import DataSeen
from inlay.statistics.on_disk import StoredStatistics
from inlay.steps.accepting import known_words

__all__ = ["calibrate", "divided", "read_batches", "requantize", "require_data", "seen_with"]

_SEARCHING = "searching ranges"


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
    require_room_for_hessians(run.plan, run.weights)
    if run.plan.needs_data:
        known_words(accept)  # before hours of observing
        shortest = _observe_all(run, batches, keeper, count_padding)
        if is_first():
            with stages("checking the trace"):
                check_trace(run, shortest, accept=accept)
    with stages(_SEARCHING):
        run.finalize(accept=accept)
    run.data += divided(batches, run.data_parts) + batches.remarks(run.plan.needs_data)
    keeper.finish(run)
    return run


def read_batches(model: nn.Module, data: Any, **options: Any) -> Batches:
    """Read this process's part of the data for a model; None stands for no data.

    :param options: those of `batches_of`
    """
    part = Part.own()
    if data is None:
        return Batches(source="no data", calibration=[], held_out=[], samples=0, part=part)
    return batches_of(data, vocabulary=_vocabulary(model), part=part, **options)


def seen_with(run: Calibration, batch: Any) -> DataSeen:
    """Add a batch to the data that a run has seen."""
    tokens, padding = count_tokens(run.model, batch, count_padding=run.count_padding)
    seen = run.data_seen
    return seen.after(samples=_rows(batch), tokens=tokens, padding=padding)


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
    with run.stages(_SEARCHING):
        run.finalize(accept=accept)
    return run


def _observe_all(run: Run, batches: Batches, keeper: Keeper, count_padding: bool) -> Any:
    """Run the data, and once more if observers have to see inputs that are equalized by then.

    :return: the shortest batch
    """
    if not run.needs_second_run:  # or the second one was interrupted
        return _observe(run, batches, keeper, count_padding)
    if not batches.can_repeat:
        raise ConfigurationError(
            f"the data is run twice, as the observers of equalized inputs have to see them, and "
            f"{batches.source} can be read only once; pass a list, set the number of samples, or "
            "observe inputs with static_minmax, which needs one run"
        )
    _observe(run, batches, keeper, count_padding)
    seen = run.data_seen
    with run.stages("equalizing"):
        run.equalize()
    keeper.begin_second_run(run)
    shortest = _observe(run, batches, keeper, count_padding)
    if run.data_seen != seen:
        raise StatisticsError(
            f"the data was not the same when it was run a second time: {run.data_seen.tokens} "
            f"tokens in {run.data_seen.batches} batches after {seen.tokens} in {seen.batches}; "
            "give data that can be read twice, such as a list"
        )
    return shortest


def _observe(run: Run, batches: Batches, keeper: Keeper, count_padding: bool) -> Any:
    """Run the data, and return its shortest batch."""
    model = run.model
    shortest: tuple[int, Any] | None = None
    checked = 0  # graphs that are known to leave out padding
    total = _count(batches)
    varying = varying_sizes(batches if total else ())
    show = run.show_progress
    counted = partial(count_tokens, model, count_padding=count_padding)
    run.auto.decide(None if total is None else sum(sum(counted(batch)) for batch in batches))
    with Bar(_label(run), total=total, unit="tokens", show=show) as bar:
        for number, batch in batches.numbered:
            look_around()
            if keeper.was_seen(number, batch):
                bar.advance(0)
                continue
            tokens, padding = counted(batch)
            if shortest is None or tokens < shortest[0]:
                shortest = tokens, batch
            _run_timed(run, on_device_of(model, batch, varying))
            if padding and not count_padding and checked < len(run.graphs):
                run.require_padding_left_out()
                checked = len(run.graphs)
            run.data_seen = seen_with(run, batch)
            bar.advance(tokens, run.tier)
            keeper.note(run, number, batch)
    keeper.require_all_met()
    require_data(DataSeen.of_all(from_all_ranks(run.data_seen)))
    return None if shortest is None else shortest[1]


def require_data(seen: DataSeen) -> None:
    """Refuse to go on without any data.

    :param seen: the data of all ranks
    """
    if not seen.batches:
        raise ConfigurationError(
            "the recipe quantizes activations statically, or weighs weights by them, and there is "
            "no data to observe; give data"
        )


def _label(run: Run) -> str:
    if not run.plan.needs_second_run:
        return "calibrating"
    return "calibrating, run 2 of 2" if run.statistics.is_second_run else "calibrating, run 1 of 2"


def divided(batches: Batches, parts: Sequence[DataSeen]) -> str:
    """Say how the data was divided over several processes, if it was."""
    counts = [part.batches for part in parts]
    if len(counts) < 2 or not any(counts):
        return ""
    each = f"{counts[0]:,} each" if len(set(counts)) == 1 else ", ".join(f"{n:,}" for n in counts)
    if len(counts) > 8 and len(set(counts)) > 1:
        each = f"{min(counts):,} to {max(counts):,} each"
    how = "divided over" if batches.is_divided else "and those of all"
    return f", {how} {len(counts)} processes ({each} of {sum(counts):,} batches)"


def _run_timed(run: Run, batch: Any) -> None:
    """Run a batch. One in which something was traced or compiled is a stage of its own."""
    known, start = run.compilations, time.perf_counter()
    run.run(batch)
    name = "calibrating" if run.compilations == known else "tracing and compiling"
    run.stages.add(name, time.perf_counter() - start)


def _count(batches: Batches) -> int | None:
    try:
        return len(batches)
    except TypeError:
        return None


def _rows(batch: Any) -> int:
    values = batch.values() if isinstance(batch, Mapping) else batch
    first = next((v for v in values if isinstance(v, torch.Tensor) and v.ndim > 0), None)
    return 0 if first is None else int(first.shape[0])


def _vocabulary(model: nn.Module) -> int | None:
    """Return how many token ids the model has embeddings for, or None if it does not say."""
    try:
        embeddings = model.get_input_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError):
        return None
    return getattr(embeddings, "num_embeddings", None)
