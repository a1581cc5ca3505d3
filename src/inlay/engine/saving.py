"""Saving a calibration as a folder: checkpoint, statistics, recipe, report."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from inlay import report as report_page
from inlay.calibration import Calibration
from inlay.checkpoint.gate import require_servable
from inlay.checkpoint.writing import save_checkpoint
from inlay.collectives import from_all_ranks
from inlay.errors import ConfigurationError
from inlay.evaluation.compare import compare
from inlay.evaluation.summary import report_of
from inlay.files import new_folder, write_atomically
from inlay.ranks.identity import is_first
from inlay.ranks.together import together
from inlay.recipe import Recipe, recipe_text
from inlay.report.data import ReportData
from inlay.run_record import Record, Stages, model_name
from inlay.statistics.on_disk import FOLDER_NAME, StoredStatistics

__all__ = ["save", "write_report", "write_statistics"]

_WRITING, _COMPARING, _REPORTING = "writing", "comparing", "judging weights"


@together()
def save(
    calibration: Calibration,
    folder: str | Path,
    *,
    overwrite: bool = False,
    max_shard_size: int | str = "5GB",
    report: bool = True,
    tokenizer: Any = None,
    held_out: Sequence[Any] = (),
    record: Record | None = None,
    stages: Stages | None = None,
) -> Path:
    """Write everything under a temporary name, and rename the folder when it is complete.

    Over ranks, every rank calls it, with a folder on a disk that all of them see. Each compresses
    and writes a part of the checkpoint. Rank 0 compares the model before and after.

    :param calibration: a finalized calibration
    :param tokenizer: a tokenizer to write beside the checkpoint
    :param held_out: batches to compare the model before and after on
    :param record: facts about the run, for the report
    :param stages: the clock of the run; writing and comparing are added to it
    """
    if calibration.qparams is None:
        raise ConfigurationError("finalize the calibration before saving it")
    model, statistics, recipe = calibration.model, calibration.statistics, calibration.recipe
    accept = statistics.accepted
    record = record or Record(model=model_name(model), data="")
    require_servable(statistics.plan, calibration.qparams, accept=accept)
    stages = stages or Stages()
    stages.forget(_WRITING, _COMPARING, _REPORTING)  # an earlier save is not part of this one
    with _folder_of_all(folder, overwrite=overwrite) as partial:
        with stages(_WRITING):
            sizes = save_checkpoint(
                partial,
                model,
                statistics.plan,
                recipe,
                calibration.qparams,
                tokenizer=tokenizer,
                max_shard_size=max_shard_size,
                accept=accept,
                weights=calibration.graphs.weights,
                progress=calibration.show_progress,
            )
            if not is_first():
                return Path(folder)
            stored = calibration.stored(model=record.model, data=record.data)
            write_statistics(partial, stored, recipe)
        if report:
            with stages(_COMPARING if held_out else _REPORTING):
                comparison = compare(model, calibration, held_out)
            record = replace(record, stages=stages.as_tuple())
            data = report_of(
                calibration, comparison, record=record, sizes=(sizes.before, sizes.after)
            )
            write_report(partial, data)
    return Path(folder)


def write_statistics(folder: Path, statistics: StoredStatistics, recipe: Recipe) -> None:
    """Write the statistics and the recipe of a run beside its checkpoint."""
    statistics.save(folder / FOLDER_NAME)
    write_atomically(folder / "recipe.yaml", recipe_text(recipe))


def write_report(folder: Path, data: ReportData) -> None:
    """Write a report beside a checkpoint, for programs and for people."""
    write_atomically(folder / "report.json", data.to_json())
    report_page.write(data, folder / "report.html")


@contextmanager
def _folder_of_all(folder: str | Path, *, overwrite: bool) -> Iterator[Path]:
    """Yield one new folder on all ranks. Rank 0 makes it and puts it in its place."""
    with ExitStack() as stack:
        own = None
        if is_first():
            own = stack.enter_context(new_folder(folder, overwrite=overwrite))
        found = from_all_ranks(own)[0]
        assert found is not None
        yield found
