"""Commands that quantize from saved statistics, and merge them."""

import functools
from pathlib import Path
from typing import Annotated

import typer

from inlay.cli.app import QUANTIZE, command
from inlay.cli.arguments import Out, ProposedOut, Quiet, RecipeOptions
from inlay.cli.flags import Only
from inlay.cli.outcome import show_result
from inlay.cli.places import proposed, require_apart, source_of
from inlay.cli.recipes import wanted_of
from inlay.cli.terminal import announce_stages, calm_transformers
from inlay.files import new_folder, require_room
from inlay.options import MODEL, LoadOptions, StreamOptions, WriteOptions, keywords_of
from inlay.ranks.identity import is_first

__all__ = ["merge", "requantize"]


@command(
    QUANTIZE,
    example="inlay requantize SmolLM2-W8A8 --model ./SmolLM2 --scheme INT8 --out SmolLM2-INT8",
    on_all_ranks=True,
)
def requantize(
    statistics: Annotated[
        Path,
        typer.Argument(
            metavar="STATISTICS",
            help="Folder of a checkpoint or of saved statistics.",
            exists=True,
            show_default=False,
        ),
    ],
    model: Annotated[
        str,
        typer.Option(
            help="Model that the statistics were gathered from.",
            rich_help_panel=MODEL,
        ),
    ],
    recipe_options: RecipeOptions,
    options: Annotated[StreamOptions, Only("accept", "overwrite", "max_shard_size", "report")],
    load_options: LoadOptions,
    out: ProposedOut = None,
    quiet: Quiet = False,
) -> None:
    """Write another checkpoint from saved statistics, without running the model."""
    out = out or proposed(model, recipe_options)
    require_apart(out, model, statistics)
    require_room(out, overwrite=options.overwrite)
    source = source_of(model, load_options)
    wanted = wanted_of(recipe_options)
    announce_stages(quiet)
    wanted.require_recipe()
    from inlay.checkpoint.loading import find_tokenizer, load_model
    from inlay.engine.calibrate import requantize as requantize_model
    from inlay.statistics.on_disk import StoredStatistics

    calm_transformers(quiet)
    stored = StoredStatistics.load(statistics)
    loaded = load_model(source)
    run = requantize_model(
        loaded,
        wanted.recipe_for(loaded),
        stored,
        tokenizer=find_tokenizer(source),
        accept=options.accept,
        progress=False if quiet else None,
    )
    run.save(out, **keywords_of(options, WriteOptions))
    if is_first() and not quiet:
        show_result(run, out)


@command(
    QUANTIZE,
    example="inlay merge first.statistics second.statistics --out both.statistics",
)
def merge(
    statistics: Annotated[
        list[Path],
        typer.Argument(
            metavar="STATISTICS",
            help="Folders of checkpoints or of saved statistics.",
            exists=True,
            show_default=False,
        ),
    ],
    out: Out,
    options: Annotated[WriteOptions, Only("overwrite")],
) -> None:
    """Merge statistics of several runs with the same recipe, as if one run saw all the data."""
    if len(statistics) < 2:
        raise typer.BadParameter("give at least two", param_hint="STATISTICS")
    require_apart(out, *statistics)
    require_room(out, overwrite=options.overwrite)
    from inlay.statistics.on_disk import StoredStatistics

    loaded = map(StoredStatistics.load, statistics)
    merged = functools.reduce(lambda one, other: one.merge(other), loaded)
    with new_folder(out, overwrite=options.overwrite) as folder:
        merged.save(folder)
    typer.echo(out)
