"""The command that searches for a recipe."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from inlay.cli.app import QUANTIZE, command
from inlay.cli.arguments import Model, Quiet, data_option, file_option
from inlay.cli.flags import Without
from inlay.cli.outcome import show_search
from inlay.cli.places import source_of
from inlay.cli.terminal import announce_stages, calm_transformers
from inlay.data.paths import rows_of
from inlay.errors import ConfigurationError
from inlay.options import DATA, OUTPUT, RECIPE, LoadOptions, SearchOptions, keywords_of

__all__ = ["search"]


@command(
    QUANTIZE,
    example="inlay search ./SmolLM2 --data chats.jsonl --bits 4.5 --out recipe.yaml",
)
def search(
    model: Model,
    options: Annotated[SearchOptions, Without("resume")],
    load_options: LoadOptions,
    out: Annotated[
        Path,
        typer.Option(
            help="Recipe to write, as YAML; the scores and a page are written beside it.",
            dir_okay=False,
            show_default=False,
            rich_help_panel=OUTPUT,
        ),
    ],
    data: Annotated[
        Path | None,
        data_option("Data as for [b]inlay calibrate[/b], to score formats on."),
    ] = None,
    ignore: Annotated[
        list[str] | None,
        typer.Option(
            help="Module to leave in full precision: its name or re:PATTERN, besides the head.",
            show_default=False,
            rich_help_panel=RECIPE,
        ),
    ] = None,
    scores: Annotated[
        Path | None,
        file_option(
            "--scores",
            help="Scores that an earlier search wrote beside its recipe. The model does not run "
            "then, and no data is needed.",
            panel=DATA,
        ),
    ] = None,
    overwrite: Annotated[
        bool,
        typer.Option("--overwrite", help="Replace a recipe.", rich_help_panel=OUTPUT),
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Choose a format for each layer, so that a model meets a target with the least loss."""
    source = source_of(model, load_options)
    if out.exists() and not overwrite:
        raise ConfigurationError(f"{out} exists; choose another name, or pass --overwrite")
    if (data is None) == (scores is None):
        raise typer.BadParameter("give exactly one of them", param_hint="--data or --scores")
    first_row = None if data is None else next(iter(rows_of(data, options)), None)
    if data is not None and first_row is None:
        raise ConfigurationError(f"{data} is empty: there is nothing to score on")
    announce_stages(quiet)
    calm_transformers(quiet)
    from inlay.checkpoint.loading import load_model, load_tokenizer
    from inlay.searching import Scores
    from inlay.searching import search as search_model
    from inlay.searching.formats import parse_formats
    from inlay.searching.targets import Target

    # Before a model is loaded for them.
    Target.of(options)
    parse_formats(options.formats, options.method)
    stored = None if scores is None else Scores.load(scores)
    is_text = first_row is not None and first_row.kind != "input_ids"
    found = search_model(
        load_model(source),
        data,
        tokenizer=load_tokenizer(source) if is_text else None,
        ignore=ignore or (),
        scores=stored,
        **keywords_of(replace(options, progress=False if quiet else None), SearchOptions),
    )
    found.save(out)
    if not quiet:
        show_search(found, out)
