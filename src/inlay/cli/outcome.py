"""The result of a run in a few lines."""

from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from inlay.cli.terminal import console

if TYPE_CHECKING:
    from inlay.engine.run import Run
    from inlay.engine.stream import Streamed
    from inlay.report import ReportData

__all__ = ["interrupted", "report_data", "show_result"]


def report_data(folder: Path) -> "ReportData | None":
    """Read the data of a folder's report; return None if it has no report."""
    from inlay.report import ReportData

    path = folder / "report.json"
    return ReportData.from_json(path.read_text(encoding="utf-8")) if path.exists() else None


def interrupted(folder: Path, what: str) -> NoReturn:
    """Say how a run that the user stopped can go on, and end.

    :param folder: keeps what the run has done so far
    :param what: the content of that folder
    """
    import typer

    from inlay.cli.terminal import tell
    from inlay.ranks.identity import is_first

    if is_first() and folder.exists():
        tell(f"interrupted; {folder} holds the {what} so far: continue with --resume")
    elif is_first():
        tell(f"interrupted before any {what} were saved; nothing was written")
    raise typer.Exit(130)


def show_result(run: "Run | Streamed", out: Path) -> None:
    """Print where a run was saved, how long its stages took, and how the output changed."""
    from rich.table import Table

    grid = Table.grid(padding=(0, 2))
    for name, value in _facts(run, out).items():
        grid.add_row(name, value)
    console().print(grid)


def _dtype_to_load(folder: Path) -> str | None:
    """Describe the only dtype in which transformers runs a checkpoint; None if any works."""
    import json

    from inlay.formats.storage import dtype_to_load

    path = folder / "config.json"
    if not path.exists():
        return None
    config = json.loads(path.read_text(encoding="utf-8")).get("quantization_config", {})
    names = [group.get("format") for group in config.get("config_groups", {}).values()]
    dtype = dtype_to_load(names)
    if dtype is None:
        return None
    name = str(dtype).removeprefix("torch.")
    return f"{name} only: transformers decompresses {', '.join(dict.fromkeys(names))} to it"


def _facts(run: "Run | Streamed", out: Path) -> dict[str, str]:
    from inlay.recipe.describe import method_in_words
    from inlay.report.numbers import count, duration, measured, size

    facts = {"checkpoint": str(out)}
    ignored = run.recipe.config.ignore
    if ignored:
        facts["full precision"] = ", ".join(ignored)
    facts["weights"] = method_in_words(run.recipe)
    data, record = report_data(out), run.record
    if data is not None:
        facts["size"] = f"{size(data.size_before)} → {size(data.size_after)}"
    dtype = _dtype_to_load(out)
    if dtype is not None:
        facts["dtype"] = dtype
    if record.data:
        facts["data"] = record.data
    if record.samples:
        padding = f" and {count(record.padding_tokens)} of padding" if record.padding_tokens else ""
        facts["tokens"] = f"{count(record.tokens)}{padding}, {count(record.samples)} samples"
    facts["time"] = ", ".join(f"{name} {duration(took)}" for name, took in record.stages)
    peak = getattr(run, "peak_memory", None)
    if peak is not None:
        facts["memory"] = f"{size(peak)} at its peak"
    for change in data.changes if data is not None else ():
        values = [(change.value, change.interval)]
        if change.value is None:
            values = [
                (change.before, change.before_interval),
                (change.after, change.after_interval),
            ]
        facts[change.name] = " → ".join(measured(*value) for value in values)
    if data is not None:
        facts["report"] = str(out / "report.html")
    return facts
