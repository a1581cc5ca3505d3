"""Calibrating from disk to disk: a model that does not fit into memory, block by block."""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from typing_extensions import Unpack

from inlay.checkpoint.loading import find_tokenizer, load_tokenizer
from inlay.checkpoint.stored_model import StoredModel
from inlay.data.paths import rows_of
from inlay.engine.batches import read_batches
from inlay.engine.run import Run
from inlay.engine.streamed.finishing import finish
from inlay.engine.streamed.journal import Journal, require_journal
from inlay.engine.streamed.peak import MemoryWatch
from inlay.engine.streamed.streaming import Streaming
from inlay.files import require_room
from inlay.options import StreamKeywords, StreamOptions
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
    recipe: Recipe | str,
    data: Any = None,
    *,
    out: str | Path,
    tokenizer: Any = None,
    processor: Any = None,
    **keywords: Unpack[StreamKeywords],
) -> Streamed:
    """Calibrate a model on disk and write its checkpoint, with one block of it in memory.

    The result is that of `calibrate` and `save`. While it runs, its work is in a folder beside
    `out`, from which an interrupted run goes on.

    Under a process group, all processes call it. Each takes its part of the data, as in
    `calibrate`, through one block after another, and writes its part of each. `out` is on a disk
    that all processes see.

    :param model: the folder of a model or its name, or what `StoredModel.open` gives for it
    :param recipe: as in `inlay.calibrate`
    :param data: as in `inlay.calibrate`
    :param out: the folder to write
    :param tokenizer: a tokenizer; by default the one that belongs to the model
    :param processor: a processor, which takes the place of the tokenizer
    :param keywords: the fields of `inlay.options.StreamOptions`. With held-out rows and a report,
        the blocks run a second time, to compare the model before and after
    """
    options = StreamOptions(**keywords)
    require_room(out, overwrite=options.overwrite)
    if options.resume and is_first():
        require_journal(Path(out))
    stages = Stages()
    with MemoryWatch() as memory:
        with stages("reading data"):
            stored = model if isinstance(model, StoredModel) else StoredModel.open(model)
            recipe = Recipe.of(recipe, stored.model, has_data=data is not None)
            tokenizer = processor or tokenizer or _tokenizer_of(stored, data, options)
            wanted = options if options.report else replace(options, held_out=0)
            batches = read_batches(stored.model, data, tokenizer, wanted)
        run = Run(
            stored.model,
            recipe,
            tokenizer=tokenizer,
            held_out=batches.held_out,
            data=batches.source,
            stages=stages,
            compiler=options.compiler,
            count_padding=options.count_padding,
            progress=options.progress,
        )
        engine = Streaming(run, stored, batches, options)
        identity = {**engine.identity(), "compiler": options.compiler}
        journal = Journal(
            Path(out), identity, resume=options.resume, decision=run.graphs.auto.stored()
        )
        run.graphs.auto.restore(journal.decision)
        engine.go_on(journal)
        finish(engine, Path(out), overwrite=options.overwrite, memory=memory)
    record = replace(run.record, stages=stages.as_tuple())
    return Streamed(folder=Path(out), recipe=recipe, record=record, peak_memory=memory.peak)


def _tokenizer_of(stored: StoredModel, data: Any, options: StreamOptions) -> Any:
    """Load the tokenizer of a model. Token ids and batches do without, if it has none."""
    is_path = isinstance(data, (str, os.PathLike))
    first = next(iter(rows_of(data, options)), None) if is_path else None
    is_text = first is not None and first.kind != "input_ids"
    return (load_tokenizer if is_text else find_tokenizer)(stored.source)
