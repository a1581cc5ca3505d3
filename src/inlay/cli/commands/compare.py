"""The command that compares two models."""

from pathlib import Path
from typing import Annotated

import typer

from inlay.cli.app import VERIFY, command
from inlay.cli.arguments import Quiet, data_option
from inlay.cli.flags import Without
from inlay.cli.outcome import show_comparison
from inlay.cli.places import source_of
from inlay.cli.terminal import calm_transformers, tell
from inlay.options import MODEL, OUTPUT, CompareOptions, keywords_of

__all__ = ["compare"]

_BEYOND_LIMITS = 3  # the exit code


@command(
    VERIFY,
    example="inlay compare ./SmolLM2 ./SmolLM2-W8A8 --data chats.jsonl --max-kl 0.05",
)
def compare(
    a: Annotated[
        str,
        typer.Argument(metavar="A", help="Folder of the model to measure by.", show_default=False),
    ],
    b: Annotated[
        str,
        typer.Argument(metavar="B", help="Folder of the model to measure.", show_default=False),
    ],
    data: Annotated[
        Path,
        data_option("Data as for [b]inlay calibrate[/b], with rows that did not calibrate."),
    ],
    options: Annotated[CompareOptions, Without("gguf_file")],
    via: Annotated[
        tuple[str, str] | None,
        typer.Option(
            "--via",
            metavar="vllm URL",
            help="Take the predictions of B from a server that has loaded it.",
            show_default=False,
            rich_help_panel=MODEL,
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON.", rich_help_panel=OUTPUT)
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Compare two models, plain or quantized: predictions, weights, tokenizers and configs.

    The exit code is 3 if B is beyond a limit.
    """
    for place in (a, b):
        source_of(place, options)
    from inlay.comparison import compare as compare_models
    from inlay.comparison.result import failures

    calm_transformers(quiet)
    given = {**keywords_of(options, CompareOptions), "progress": False if quiet else None}
    found = compare_models(a, b, data, via=via, **given)
    if as_json:
        typer.echo(found.to_json())
    elif not quiet:
        show_comparison(found)
    beyond = failures(found, options)
    for text in beyond:
        tell(f"failed: {text}")
    if beyond:
        raise typer.Exit(_BEYOND_LIMITS)
