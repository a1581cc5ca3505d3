"""A calibration as a folder: checkpoint, statistics, recipe, report."""

from dataclasses import replace
from pathlib import Path

from inlay import report as report_page
from inlay.calibration import Calibration
from inlay.checkpoint.gate import require_servable
from inlay.checkpoint.writing import save_checkpoint
from inlay.errors import ConfigurationError
from inlay.evaluation.compare import compare
from inlay.evaluation.summary import report_of
from inlay.files import new_folder, write_atomically
from inlay.recipe import recipe_text
from inlay.run_record import Record, Stages
from inlay.statistics.on_disk import FOLDER_NAME

__all__ = ["save"]


def save(
    calibration: Calibration,
    folder: str | Path,
    *,
    overwrite: bool,
    max_shard_size: int | str,
    report: bool,
) -> Path:
    """Write everything under a temporary name, and give it its own when it is complete."""
    if calibration.qparams is None:
        raise ConfigurationError("finalize the calibration before saving it")
    model, statistics = calibration.model, calibration.statistics
    accept = statistics.accepted
    record = calibration.record or Record(model=type(model).__name__, data="")
    require_servable(statistics.plan, calibration.qparams, accept=accept)
    stages = Stages()
    with new_folder(folder, overwrite=overwrite) as partial:
        with stages("writing"):
            sizes = save_checkpoint(
                partial,
                model,
                statistics.plan,
                calibration.recipe,
                calibration.qparams,
                tokenizer=calibration.tokenizer,
                max_shard_size=max_shard_size,
                accept=accept,
                progress=calibration.show_progress,
            )
            stored = calibration.stored(model=record.model, data=record.data)
            stored.save(partial / FOLDER_NAME)
            write_atomically(partial / "recipe.yaml", recipe_text(calibration.recipe.config))
        if report:
            with stages("comparing"):
                comparison = compare(model, calibration, calibration.held_out)
            record = replace(record, stages=(*record.stages, *stages.as_tuple()))
            data = report_of(
                calibration, comparison, record=record, sizes=(sizes.before, sizes.after)
            )
            write_atomically(partial / "report.json", data.to_json())
            report_page.write(data, partial / "report.html")
    return Path(folder)
