"""Commands that list presets and observers, and write a report again."""

from pathlib import Path
from typing import Annotated

import typer

from inlay.cli.app import app
from inlay.cli.arguments import ObserverFile
from inlay.cli.known import observer_rows, preset_rows
from inlay.cli.outcome import report_data
from inlay.cli.recipes import run_observer_file
from inlay.cli.terminal import console, reported, table
from inlay.errors import ConfigurationError

__all__ = ["observers", "report", "schemes"]


@app.command()
@reported
def report(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="DIR",
            help="Folder of a checkpoint.",
            exists=True,
            file_okay=False,
            show_default=False,
        ),
    ],
) -> None:
    """Write report.html of a checkpoint again, from its report.json.

    Example: [b]inlay report SmolLM2-W8A8[/b]
    """
    from inlay.report import write

    data = report_data(folder)
    if data is None:
        raise ConfigurationError(
            f"{folder} has no report.json; only a checkpoint saved with a report has one"
        )
    typer.echo(write(data, folder / "report.html"))


@app.command()
@reported
def schemes() -> None:
    """List the presets for --scheme.

    Example: [b]inlay schemes[/b]
    """
    rows = table("scheme", "weights", "input activations")
    for row in preset_rows():
        rows.add_row(*row)
    console().print(rows)


@app.command()
@reported
def observers(observer_file: ObserverFile = None) -> None:
    """List the observers for --observer, with their settings.

    Example: [b]inlay observers --observer-file my_observer.py[/b]
    """
    if observer_file is not None:
        run_observer_file(observer_file)
    rows = table("observer", "for", "settings", "range")
    for row in observer_rows():
        rows.add_row(*row)
    console().print(rows)
