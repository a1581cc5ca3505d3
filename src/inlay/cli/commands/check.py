"""The command that checks an architecture."""

from typing import Annotated, Any

import typer

from inlay.cli.app import VERIFY, command
from inlay.cli.arguments import Model, RecipeOptions
from inlay.cli.flags import Without
from inlay.cli.places import source_of
from inlay.cli.recipes import wanted_of
from inlay.cli.terminal import calm_transformers, console
from inlay.errors import ConfigurationError
from inlay.options import LoadOptions

__all__ = ["check"]

_ROWS, _TOKENS = 2, (16, 24)  # of the batches: two lengths, as lengths vary in use


@command(
    VERIFY,
    example="inlay check ./SmolLM2 --scheme W8A8_STATIC",
)
def check(
    model: Model,
    recipe_options: RecipeOptions,
    load_options: Annotated[LoadOptions, Without("dtype")],
    layers: Annotated[
        int, typer.Option(min=1, help="How many layers of the model to build at most.")
    ] = 2,
    compiler: Annotated[str, typer.Option(help="Backend of torch.compile to check.")] = "eager",
) -> None:
    """Check that Inlay gets a model right, on random weights. Reads only its config."""
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
