"""From a model and data to a finalized calibration."""

import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from inlay.calibration import Calibration
from inlay.checkpoint.loading import require_full_precision
from inlay.data.batch import count_tokens, digest, on_device_of, varying_sizes
from inlay.data.sources import Batches, batches_of
from inlay.errors import ConfigurationError, StatisticsError
from inlay.progress import Bar
from inlay.recipe import Recipe
from inlay.run_record import Record, Stages
from inlay.statistics.on_disk import FILE_NAME, DataSeen, StoredStatistics

__all__ = ["calibrate"]

# Seconds between two savings of the statistics: what an interruption may cost.
_SAVE_EVERY = 60.0
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
    compiler: str = "inductor",
    accept: Collection[str] = (),
    statistics: str | Path | None = None,
    resume: bool = False,
    progress: bool | None = None,
) -> Calibration:
    """Observe the model on data, then compute what it is quantized with.

    :param data: batches, texts, a `.txt` or `.jsonl` file or a dataset; see `inlay.data`. None
        where the recipe needs no data: weights alone, or activations quantized dynamically
    :param tokenizer: for data that is text
    :param max_length: tokens after which a text is cut
    :param samples: how many rows calibrate; all if not given
    :param held_out: how many rows after those are kept for comparing the model before and after
    :param count_padding: whether positions that the attention mask leaves out count all the same
    :param accept: see `Calibration.finalize`
    :param statistics: a folder to keep the statistics in while the run goes on
    :param resume: whether to go on from the statistics found there
    :param progress: whether to draw progress bars; by default where there is a terminal
    :return: the finalized calibration, ready for `save`
    """
    require_full_precision(getattr(model, "config", None), _name_of(model))
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
    options = {"compiler": compiler, "count_padding": count_padding, "progress": progress}
    keeper = _Keeper(None if statistics is None else Path(statistics), _name_of(model), batches)
    calibration = keeper.begin(model, recipe, resume, **options)
    if calibration.plan.needs_data:
        _observe(calibration, model, batches, stages, keeper, count_padding)
    with stages("searching ranges"):
        calibration.finalize(accept=accept)
    keeper.save(calibration)
    done = calibration.data_seen
    calibration.tokenizer = tokenizer
    calibration.held_out = [on_device_of(model, batch) for batch in batches.held_out]
    calibration.record = Record(
        model=_name_of(model),
        data=batches.source,
        samples=done.samples,
        tokens=done.tokens,
        padding_tokens=done.padding_tokens,
        stages=stages.as_tuple(),
    )
    return calibration


def _observe(
    calibration: Calibration,
    model: nn.Module,
    batches: Batches,
    stages: Stages,
    keeper: "_Keeper",
    count_padding: bool,
) -> None:
    already = calibration.data_seen
    again = DataSeen()  # what is passed over, for it was observed before
    checked = 0  # graphs that are known to leave out padding
    varying = varying_sizes(batches if _count(batches) else ())
    show = calibration.show_progress
    with Bar("calibrating", total=_count(batches), unit="tokens", show=show) as bar:
        for batch in batches:
            tokens, padding = count_tokens(batch)
            step = {"samples": _rows(batch), "tokens": tokens, "padding": padding}
            if again.batches < already.batches:
                again = again.after(digest(batch), **step)
                if again.batches == already.batches and again != already:
                    raise StatisticsError(
                        f"the first {already.batches} batches are not those of the run that was "
                        "interrupted; resume with the same data and settings, or start anew"
                    )
                bar.advance(0)
                continue
            _timed(calibration, on_device_of(model, batch, varying), stages)
            if padding and not count_padding and checked < len(calibration.graphs):
                calibration.require_padding_left_out()
                checked = len(calibration.graphs)
            calibration.data_seen = calibration.data_seen.after(digest(batch), **step)
            bar.advance(tokens)
            keeper.save_now_and_then(calibration)
    if again.batches < already.batches:
        raise StatisticsError(
            f"the data has {again.batches} batches, and the run that was interrupted had got "
            f"through {already.batches}; resume with the same data"
        )
    if calibration.data_seen.batches == 0:
        raise ConfigurationError(
            "the recipe quantizes activations statically, or weighs weights by them, and there is "
            "no data to observe; give data"
        )


def _timed(calibration: Calibration, batch: Any, stages: Stages) -> None:
    """Run a batch. One of a new shape is traced and compiled, which is a stage of its own."""
    known, start = len(calibration.graphs), time.perf_counter()
    calibration.run(batch)
    name = "calibrating" if len(calibration.graphs) == known else "tracing and compiling"
    stages.add(name, time.perf_counter() - start)


class _Keeper:
    """Keeps the statistics of a run in a folder, if there is one."""

    def __init__(self, folder: Path | None, model: str, batches: Batches) -> None:
        self.folder, self.model, self.data = folder, model, batches.source
        self._saved = time.monotonic()

    def begin(self, model: nn.Module, recipe: Recipe, resume: bool, **options: Any) -> Calibration:
        found = self.folder is not None and (self.folder / FILE_NAME).exists()
        if not resume:
            if found:
                raise ConfigurationError(
                    f"{self.folder} holds the statistics of an earlier run; go on with it "
                    "(resume=True, --resume), or remove it"
                )
            return Calibration(model, recipe, **options)
        if self.folder is None:
            raise ConfigurationError("to resume, say where the statistics are: statistics=folder")
        if not found:
            return Calibration(model, recipe, **options)
        stored = StoredStatistics.load(self.folder)
        if stored.recipe != recipe.config.model_dump(mode="json"):
            raise ConfigurationError(
                f"{self.folder} was calibrated with another recipe; resume with the same one"
            )
        return Calibration.from_statistics(model, recipe, stored, **options)

    def save_now_and_then(self, calibration: Calibration) -> None:
        if time.monotonic() - self._saved >= _SAVE_EVERY:
            self.save(calibration)

    def save(self, calibration: Calibration) -> None:
        if self.folder is not None:
            calibration.stored(model=self.model, data=self.data).save(self.folder)
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
    """How many token ids the model has embeddings for, if it says so."""
    try:
        embeddings = model.get_input_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError):
        return None
    return getattr(embeddings, "num_embeddings", None)


def _name_of(model: nn.Module) -> str:
    return str(getattr(model, "name_or_path", "") or type(model).__name__)
