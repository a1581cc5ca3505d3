"""The command that searches for a recipe."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from inlay.cli.app import QUANTIZE, command
from inlay.cli.arguments import MethodName, Model, Quiet, data_option, file_option
from inlay.cli.flags import Without
from inlay.cli.outcome import show_search
from inlay.cli.places import source_of
from inlay.cli.terminal import announce_stages, calm_transformers
from inlay.data.paths import rows_of
from inlay.errors import ConfigurationError
from inlay.options import DATA, LIMITS, OUTPUT, RECIPE, LoadOptions, Options, keywords_of

__all__ = ["search"]

_FORMATS = "W4A16:group_size=64,W8A16,bf16"


@command(
    QUANTIZE,
    example="inlay search ./SmolLM2 --data chats.jsonl --bits 4.5 --out recipe.yaml",
)
def search(
    model: Model,
    options: Annotated[Options, Without("resume")],
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
    bits: Annotated[
        float | None,
        typer.Option(
            help="Mean bits of a weight, without scales.",
            show_default=False,
            rich_help_panel=LIMITS,
        ),
    ] = None,
    size: Annotated[
        str | None,
        typer.Option(
            help="Size of the checkpoint, such as 2.1GB.",
            show_default=False,
            rich_help_panel=LIMITS,
        ),
    ] = None,
    max_kl: Annotated[
        float | None,
        typer.Option(
            help="KL divergence from the model on held-out rows, in nats per position. The "
            "smallest checkpoint within it is found.",
            show_default=False,
            rich_help_panel=LIMITS,
        ),
    ] = None,
    formats: Annotated[
        str,
        typer.Option(
            metavar="NAME[:KEY=VALUE,…],…",
            help="Formats to choose among: presets with changes of their weights, and [b]bf16[/b] "
            "for layers that stay as they are.",
            rich_help_panel=RECIPE,
        ),
    ] = _FORMATS,
    method: Annotated[
        MethodName,
        typer.Option(
            help="How formats without an observer quantize, as for [b]inlay calibrate[/b].",
            rich_help_panel=RECIPE,
        ),
    ] = MethodName.BEST,
    ignore: Annotated[
        list[str] | None,
        typer.Option(
            help="Module to leave in full precision: its name or re:PATTERN, besides the head.",
            show_default=False,
            rich_help_panel=RECIPE,
        ),
    ] = None,
    forward_only: Annotated[
        bool,
        typer.Option(
            "--forward-only",
            help="Score layers by their relative error, without gradients. It needs less time and "
            "memory, and chooses worse.",
            rich_help_panel=RECIPE,
        ),
    ] = False,
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
    if sum(each is not None for each in (bits, size, max_kl)) != 1:
        raise typer.BadParameter(
            "give exactly one of them", param_hint="--bits, --size or --max-kl"
        )
    first_row = None if data is None else next(iter(rows_of(data, options)), None)
    if data is not None and first_row is None:
        raise ConfigurationError(f"{data} is empty: there is nothing to score on")
    announce_stages(quiet)
    from inlay.searching.formats import parse_formats
    from inlay.searching.scores import Scores
    from inlay.searching.targets import Target

    calm_transformers(quiet)
    Target.of(bits, size, max_kl)
    parse_formats(formats, method.value)
    stored = None if scores is None else Scores.load(scores)
    from inlay.checkpoint.loading import load_model, load_tokenizer
    from inlay.searching import search as search_model

    is_text = first_row is not None and first_row.kind != "input_ids"
    found = search_model(
        load_model(source),
        data,
        tokenizer=load_tokenizer(source) if is_text else None,
        bits=bits,
        size=size,
        max_kl=max_kl,
        formats=formats,
        method=method.value,
        ignore=ignore or (),
        forward_only=forward_only,
        scores=stored,
        **keywords_of(replace(options, progress=False if quiet else None), Options),
    )
    found.save(out)
    if not quiet:
        show_search(found, out)
