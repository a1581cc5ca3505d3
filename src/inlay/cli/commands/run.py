"""The command that runs a quantized checkpoint."""

import json
from typing import Annotated, Any

import typer

from inlay.cli.app import RUN, command
from inlay.cli.arguments import Model
from inlay.cli.flags import Without
from inlay.cli.places import source_of
from inlay.cli.terminal import calm_transformers
from inlay.options import LoadOptions

__all__ = ["run"]


@command(
    RUN,
    example="inlay run ./SmolLM2-W8A8 --text 'Once upon a time'",
)
def run(
    model: Model,
    load_options: Annotated[LoadOptions, Without("gguf_file")],
    text: Annotated[
        list[str],
        typer.Option("--text", help="What to continue or embed; may be repeated."),
    ],
    tokens: Annotated[int, typer.Option(min=1, help="How many tokens to add at most.")] = 64,
    compiled: Annotated[
        bool, typer.Option("--compile/--no-compile", help="Compile first; pays for many tokens.")
    ] = False,
) -> None:
    """Run a quantized checkpoint: continue texts, or print their embeddings as JSON."""
    source = source_of(model, load_options)
    calm_transformers(quiet=True)
    from inlay.checkpoint.loading import load_tokenizer
    from inlay.serving.loading import load
    from inlay.serving.using import continued, embedded

    loaded: Any = load(source, compile=compiled)
    tokenizer = load_tokenizer(source)
    if loaded.can_generate():
        results = continued(loaded, tokenizer, text, tokens=tokens)
    else:
        results = [json.dumps(vector) for vector in embedded(loaded, tokenizer, text).tolist()]
    for result in results:
        typer.echo(result)
