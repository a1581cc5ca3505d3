"""Calibrating from disk to disk: a model that does not fit into memory, block by block."""

import os
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from inlay.checkpoint.loading import find_tokenizer, load_tokenizer
from inlay.checkpoint.stored_model import StoredModel
from inlay.data.tokenize import read_rows
from inlay.engine.batches import read_batches
from inlay.engine.run import Run
from inlay.engine.streamed.finishing import finish
from inlay.engine.streamed.journal import Journal, require_journal
from inlay.engine.streamed.peak import MemoryWatch
from inlay.engine.streamed.streaming import Settings, Streaming
from inlay.files import require_room
from inlay.ranks.identity import is_first
from inlay.ranks.together import together
from inlay.recipe import Recipe
from inlay.run_record import Record, Stages

__all__ = ["Streamed", "stream"]


@dataclass(frozen=True, kw_only=True)
class Streamed:
    """What a streamed run has written.

    :param folder: the checkpoint, with statistics and report
    :param peak_memory: bytes that no file backs, at the peak of the process that took most; None
        where the system does not say
    """

    folder: Path
    recipe: Recipe
    record: Record
    peak_memory: int | None


@together()
def stream(
    model: str | os.PathLike[str] | StoredModel,
    recipe: Recipe,
    data: Any = None,
    *,
    out: str | Path,
    tokenizer: Any = None,
    max_length: int = 2048,
    samples: int | None = None,
    batch_size: int = 1,
    held_out: int = 16,
    count_padding: bool = False,
    compiler: str = "auto",
    accept: Collection[str] = (),
    offload_activations: bool = False,
    resume: bool = False,
    overwrite: bool = False,
    max_shard_size: int | str = "5GB",
    report: bool = True,
    progress: bool | None = None,
) -> Streamed:
    """Calibrate a model on disk and write its checkpoint, with one block of it in memory.

    The result is that of `calibrate` and `save`. While it runs, its work is in a folder beside
    `out`, from which an interrupted run goes on.

    Under a process group, all processes call it. Each takes its part of the data, as in
    `calibrate`, through one block after another, and writes its part of each. `out` is on a disk
    that all processes see.

    :param model: the folder of a model or its name, or what `StoredModel.open` gives for it
    :param data: as in `inlay.calibrate`
    :param out: the folder to write
    :param tokenizer: a tokenizer; by default the one that belongs to the model
    :param held_out: how many rows to compare the model before and after on, in a second pass over
        the blocks; none, and no second pass, if 0
    :param offload_activations: keep what flows between blocks on disk alone, not in memory too
    :param resume: go on with a run that was interrupted
    :param overwrite: replace `out` if it is not empty
    :param report: write a report
    """
    require_room(out, overwrite=overwrite)
    if resume and is_first():
        require_journal(Path(out))
    stages = Stages()
    with MemoryWatch() as memory:
        with stages("reading data"):
            stored = model if isinstance(model, StoredModel) else StoredModel.open(model)
            tokenizer = tokenizer or _tokenizer_of(stored, data)
            batches = read_batches(
                stored.model,
                data,
                tokenizer=tokenizer,
                max_length=max_length,
                samples=samples,
                batch_size=batch_size,
                held_out=held_out if report else 0,
            )
        run = Run(
            stored.model,
            recipe,
            tokenizer=tokenizer,
            held_out=batches.held_out,
            data=batches.source,
            stages=stages,
            compiler=compiler,
            count_padding=count_padding,
            progress=progress,
        )
        settings = Settings(
            max_shard_size=max_shard_size,
            accept=tuple(accept),
            offload=offload_activations,
            count_padding=count_padding,
            report=report,
        )
        engine = Streaming(run, stored, batches, settings)
        identity = {**engine.identity(), "compiler": compiler}
        journal = Journal(Path(out), identity, resume=resume, decision=run.auto.stored())
        run.auto.restore(journal.decision)
        engine.go_on(journal)
        finish(engine, Path(out), overwrite=overwrite, memory=memory)
    record = replace(run.record, stages=stages.as_tuple())
    return Streamed(folder=Path(out), recipe=recipe, record=record, peak_memory=memory.peak)


def _tokenizer_of(stored: StoredModel, data: Any) -> Any:
    """Load the tokenizer of a model. Token ids and batches do without, if it has none."""
    source = stored.source
    options: dict[str, Any] = {
        "trust_remote_code": source.trust_remote_code,
        "download": source.download,
    }
    first = next(read_rows(data), None) if isinstance(data, (str, os.PathLike)) else None
    is_text = first is not None and first.kind != "input_ids"
    return (load_tokenizer if is_text else find_tokenizer)(source.place, **options)
