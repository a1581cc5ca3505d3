"""Commands that list presets and observers, and write a report again."""

from pathlib import Path
from typing import Annotated

import typer

from inlay.cli.app import app
from inlay.cli.arguments import ObserverFile
from inlay.cli.outcome import report_data
from inlay.cli.terminal import console, reported, table
from inlay.errors import ConfigurationError
from inlay.report.numbers import MISSING

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
    from inlay.recipe import Recipe, format_in_words, preset_names

    rows = table("scheme", "weights", "input activations")
    for name in preset_names():
        (group,) = Recipe.from_preset(name).config.config_groups.values()
        parts = {"weight": group.weights, "input": group.input_activations}
        words = (format_in_words(args, of) if args else MISSING for of, args in parts.items())
        rows.add_row(name, *words)
    console().print(rows)


@app.command()
@reported
def observers(observer_file: ObserverFile = None) -> None:
    """List the observers for --observer, with their settings.

    Example: [b]inlay observers --observer-file my_observer.py[/b]
    """
    from inlay.cli.recipes import run_observer_file
    from inlay.observers import Observer

    if observer_file is not None:
        run_observer_file(observer_file)
    rows = table("observer", "for", "settings", "range")
    # The registry writes hyphens and takes either; everywhere else names have underscores.
    for name in sorted(name.replace("-", "_") for name in Observer.registered_names()):
        cls = Observer.get_value_from_registry(name)
        settings = ", ".join(f"{kwarg.name}={kwarg.default}" for kwarg in cls._kwargs)
        about = (cls.__doc__ or "").strip().partition("\n")[0]
        # An observer that keeps only the last value does not suit values that come in batches.
        of_weights = cls.observes_input or not cls._act_sync_dict
        rows.add_row(name, "weights" if of_weights else "activations", settings, about)
    console().print(rows)
