"""Calibrating a model on data, or quantizing it anew from saved statistics."""

import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from inlay.checkpoint.loading import require_full_precision
from inlay.data.batch import count_tokens, digest, on_device_of, varying_sizes
from inlay.data.sources import Batches, batches_of
from inlay.errors import ConfigurationError, StatisticsError
from inlay.files import require_writable
from inlay.progress import Bar
from inlay.recipe import Recipe
from inlay.run_record import Stages, model_name
from inlay.statistics.on_disk import FILE_NAME, DataSeen, StoredStatistics
from inlay.workflow.calibration_run import Run

__all__ = ["calibrate", "requantize"]

# Seconds between two saves of the statistics: the most that an interruption can cost.
_SAVE_EVERY = 60.0
_SEARCHING = "searching ranges"
_NO_DATA = Batches(source="no data", calibration=[], held_out=[], samples=0)


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
        batches = (
            _NO_DATA
            if data is None
            else batches_of(
                data,
                tokenizer=tokenizer,
                max_length=max_length,
                samples=samples,
                batch_size=batch_size,
                held_out=held_out,
                vocabulary=_vocabulary(model),
            )
        )
    keeper = _Keeper(None if statistics is None else Path(statistics), name, batches)
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
    if run.plan.needs_data:
        _observe_all(run, batches, keeper, count_padding)
    with stages(_SEARCHING):
        run.finalize(accept=accept)
    keeper.save(run)
    return run


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

    :param statistics: statistics of the same model, gathered for a recipe like this one
    :param tokenizer: a tokenizer to write beside the checkpoint
    :param accept: see `Calibration.finalize`
    :param progress: draw progress bars; by default if there is a terminal
    :return: the finalized calibration, ready for `save`
    """
    run = _restored(
        model, recipe, statistics, tokenizer=tokenizer, data=statistics.data, progress=progress
    )
    with run.stages(_SEARCHING):
        run.finalize(accept=accept)
    return run


def _restored(model: nn.Module, recipe: Recipe, stored: StoredStatistics, **options: Any) -> Run:
    run = Run.from_statistics(model, recipe, stored, **options)
    assert isinstance(run, Run)
    return run


def _observe_all(run: Run, batches: Batches, keeper: "_Keeper", count_padding: bool) -> None:
    """Run the data, and once more if observers have to see inputs that are equalized by then."""
    if not run.needs_second_run:  # or the second one was interrupted
        _observe(run, batches, keeper, count_padding)
        return
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
    keeper.save(run)
    _observe(run, batches, keeper, count_padding)
    if run.data_seen != seen:
        raise StatisticsError(
            f"the data was not the same when it was run a second time: {run.data_seen.tokens} "
            f"tokens in {run.data_seen.batches} batches after {seen.tokens} in {seen.batches}; "
            "give data that can be read twice, such as a list"
        )


def _observe(run: Run, batches: Batches, keeper: "_Keeper", count_padding: bool) -> None:
    model, already = run.model, run.data_seen
    again = DataSeen()  # batches that the interrupted run has observed already
    checked = 0  # graphs that are known to leave out padding
    total = _count(batches)
    varying = varying_sizes(batches if total else ())
    show = run.show_progress
    if total is not None:
        run.expect(total - already.batches)
    with Bar(_label(run), total=total, unit="tokens", show=show) as bar:
        for batch in batches:
            tokens, padding = count_tokens(batch)
            step = {"samples": _rows(batch), "tokens": tokens, "padding": padding}
            if again.batches < already.batches:
                again = again.after(keeper.fingerprint(batch), **step)
                if again.batches == already.batches and again != already:
                    raise StatisticsError(
                        f"the first {already.batches} batches are not those of the interrupted "
                        "run; resume with the same data and settings, or start anew"
                    )
                bar.advance(0)
                continue
            _run_timed(run, on_device_of(model, batch, varying))
            if padding and not count_padding and checked < len(run.graphs):
                run.require_padding_left_out()
                checked = len(run.graphs)
            run.data_seen = run.data_seen.after(keeper.fingerprint(batch), **step)
            bar.advance(tokens, run.tier)
            keeper.save_now_and_then(run)
    if again.batches < already.batches:
        raise StatisticsError(
            f"the data has {again.batches} batches, but the interrupted run had observed "
            f"{already.batches}; resume with the same data"
        )
    if run.data_seen.batches == 0:
        raise ConfigurationError(
            "the recipe quantizes activations statically, or weighs weights by them, and there is "
            "no data to observe; give data"
        )


def _label(run: Run) -> str:
    if not run.plan.needs_second_run:
        return "calibrating"
    return "calibrating, run 2 of 2" if run.statistics.is_second_run else "calibrating, run 1 of 2"


def _run_timed(run: Run, batch: Any) -> None:
    """Run a batch. One in which something was traced or compiled is a stage of its own."""
    known, start = run.compilations, time.perf_counter()
    run.run(batch)
    name = "calibrating" if run.compilations == known else "tracing and compiling"
    run.stages.add(name, time.perf_counter() - start)


class _Keeper:
    """Saves the statistics of a run in a folder now and then, if it has one."""

    def __init__(self, folder: Path | None, model: str, batches: Batches) -> None:
        self.folder, self.model, self.data = folder, model, batches.source
        self._saved = time.monotonic()

    def begin(self, model: nn.Module, recipe: Recipe, resume: bool, **options: Any) -> Run:
        if self.folder is not None:
            require_writable(self.folder)
        found = self.folder is not None and (self.folder / FILE_NAME).exists()
        if not resume:
            if found:
                raise ConfigurationError(
                    f"{self.folder} holds the statistics of an earlier run; continue it "
                    "(resume=True, --resume), or remove the folder"
                )
            return Run(model, recipe, **options)
        if self.folder is None:
            raise ConfigurationError("to resume, name the folder of statistics: statistics=folder")
        if not found:
            return Run(model, recipe, **options)
        stored = StoredStatistics.load(self.folder)
        if stored.recipe != recipe.fields:
            raise ConfigurationError(
                f"{self.folder} was calibrated with another recipe; resume with the same one"
            )
        if stored.data_seen.is_unknown:
            raise ConfigurationError(
                f"{self.folder} does not say which batches its statistics are of, as those of a "
                "checkpoint and merged ones do not; start anew with another folder, and merge the "
                "two (StoredStatistics.merge, inlay merge)"
            )
        return _restored(model, recipe, stored, **options)

    def fingerprint(self, batch: Any) -> bytes | None:
        """Return the fingerprint of a batch where statistics are kept, since it takes time."""
        return None if self.folder is None else digest(batch)

    def save_now_and_then(self, run: Run) -> None:
        if time.monotonic() - self._saved >= _SAVE_EVERY:
            self.save(run)

    def save(self, run: Run) -> None:
        if self.folder is not None:
            run.stored(model=self.model, data=self.data).save(self.folder)
        self._saved = time.monotonic()


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
