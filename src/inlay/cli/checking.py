"""Commands that run a model: one checks an architecture, one uses a quantized checkpoint."""

import json
from typing import Annotated, Any

import typer

from inlay.cli.app import app
from inlay.cli.arguments import Model, RecipeOptions
from inlay.cli.commands import source_of
from inlay.cli.flags import Without, with_flags
from inlay.cli.recipes import wanted_of
from inlay.cli.terminal import calm_transformers, console, reported
from inlay.errors import ConfigurationError
from inlay.options import LoadOptions

__all__ = ["check", "run"]

_ROWS, _TOKENS = 2, (16, 24)  # of the batches: two lengths, as lengths vary in use


@app.command()
@reported
@with_flags
def check(
    model: Model,
    recipe_options: RecipeOptions,
    load_options: Annotated[LoadOptions, Without("dtype")],
    layers: Annotated[
        int, typer.Option(min=1, help="How many layers of the model to build at most.")
    ] = 2,
    compiler: Annotated[str, typer.Option(help="Backend of torch.compile to check.")] = "eager",
) -> None:
    """Check that Inlay gets a model right, on random weights. Reads only its config.

    Example: [b]inlay check ./SmolLM2 --scheme W8A8_STATIC[/b]
    """
    source = source_of(model, load_options)
    wanted = wanted_of(recipe_options)
    wanted.require_recipe()
    from inlay.checking import check_calibration
    from inlay.checkpoint.loading import random_model

    calm_transformers(quiet=True)
    built = random_model(source, layers=layers)
    found = check_calibration(
        built,
        wanted.recipe_for(built),
        [_batch(built, tokens) for tokens in _TOKENS],
        compiler=compiler,
        tolerance=0.0 if compiler in ("eager", "aot_eager") else 1e-2,
    )
    screen = console()
    screen.print(f"{type(built).__name__} with random weights and at most {layers} layers:")
    for text in found.done:
        screen.print(f"  right: {text}", soft_wrap=True)
    for text in found.left_out:
        screen.print(f"  not checked: {text}", soft_wrap=True)


@app.command()
@reported
@with_flags
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
    """Run a quantized checkpoint: continue texts, or print their embeddings as JSON.

    Example: [b]inlay run ./SmolLM2-W8A8 --text "Once upon a time"[/b]
    """
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


def _batch(model: Any, tokens: int) -> dict[str, Any]:
    """A batch of random inputs, the same every time."""
    import torch

    generator = torch.Generator().manual_seed(tokens)
    config = model.config
    if model.main_input_name == "input_ids":
        text = config.get_text_config()
        ids = torch.randint(0, text.vocab_size, (_ROWS, tokens), generator=generator)
        mask = torch.ones_like(ids)
        mask[-1, tokens * 3 // 4 :] = 0  # padding, which is checked too
        batch = {"input_ids": ids, "attention_mask": mask}
        return {**batch, "decoder_input_ids": ids} if config.is_encoder_decoder else batch
    if model.main_input_name == "pixel_values" and hasattr(config, "image_size"):
        size = config.image_size
        height, width = (size, size) if isinstance(size, int) else size
        shape = (_ROWS, getattr(config, "num_channels", 3), height, width)
        return {"pixel_values": torch.randn(shape, generator=generator).to(model.dtype)}
    raise ConfigurationError(
        f"cannot make up {model.main_input_name} for {type(model).__name__}; call "
        "inlay.testing.check_calibration(model, recipe, batches) with batches of your own"
    )
