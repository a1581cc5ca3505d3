"""Commands that show a plan or a report, and list schemes and observers."""

from pathlib import Path
from typing import Annotated

import typer

from inlay.cli.app import INSPECT, command
from inlay.cli.arguments import Model, ObserverFile, RecipeOptions
from inlay.cli.flags import Without
from inlay.cli.known import observer_rows, preset_rows, use_of_data
from inlay.cli.outcome import report_data
from inlay.cli.places import source_of
from inlay.cli.recipes import run_observer_file, wanted_of
from inlay.cli.terminal import calm_transformers, console, table
from inlay.errors import ConfigurationError
from inlay.options import LoadOptions

__all__ = ["explain", "observers", "report", "schemes"]


@command(
    INSPECT,
    example="inlay explain ./SmolLM2 --scheme FP8 --kv-cache fp8",
)
def explain(
    model: Model,
    recipe_options: RecipeOptions,
    load_options: Annotated[LoadOptions, Without("dtype")],
) -> None:
    """Show what would be quantized and observed. Reads only the config of the model."""
    source = source_of(model, load_options)
    wanted = wanted_of(recipe_options)
    wanted.require_recipe()
    from inlay.checkpoint.loading import empty_model
    from inlay.cli.tree import tree_of
    from inlay.recipe import Plan

    calm_transformers(quiet=True)
    empty = empty_model(source)
    plan = Plan(empty, wanted.recipe_for(empty))
    screen = console()
    screen.print(tree_of(plan, type(empty).__name__))
    modules = {slot.module for slot in plan.slots.values()}
    observed = sum(1 for _ in plan.activation_slots())
    screen.print(
        f"{len(plan.slots)} slots in {len(modules)} modules are quantized, {observed} of them "
        "observed while data runs"
    )
    if plan.recipe.equalize is not None:
        screen.print(
            "Which inputs can be equalized shows in the graph, when data runs: the report says it"
        )
    if plan.needs_second_run:
        screen.print(
            "Data is run twice: the observers of equalized inputs have to see them scaled "
            "(static_minmax does not)"
        )
    left = [name for name, kind in plan.kinds.items() if kind == "linear" and name not in modules]
    if left:
        more = f" and {len(left) - 8} more" if len(left) > 8 else ""
        screen.print(f"Linear in full precision: {', '.join(left[:8])}{more}", soft_wrap=True)


@command(
    INSPECT,
    example="inlay report SmolLM2-W8A8",
)
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
    """Write report.html of a checkpoint again, from its report.json."""
    from inlay.report import write

    data = report_data(folder)
    if data is None:
        raise ConfigurationError(
            f"{folder} has no report.json; only a checkpoint saved with a report has one"
        )
    typer.echo(write(data, folder / "report.html"))


@command(
    INSPECT,
    example="inlay schemes",
)
def schemes() -> None:
    """List the presets for --scheme, whether they need data, and the observers to choose from."""
    rows = table("scheme", "weights", "input activations", "data")
    for row in preset_rows():
        rows.add_row(*row, use_of_data(row))
    console().print(rows)
    chosen = table("observer", "for", "range")
    for name, part, _, words in observer_rows():
        chosen.add_row(name, part, words)
    console().print(chosen)


@command(
    INSPECT,
    example="inlay observers --observer-file my_observer.py",
)
def observers(observer_file: ObserverFile = None) -> None:
    """List the observers for --observer, with their settings."""
    if observer_file is not None:
        run_observer_file(observer_file)
    rows = table("observer", "for", "settings", "range")
    for row in observer_rows():
        rows.add_row(*row)
    console().print(rows)
