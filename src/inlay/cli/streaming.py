"""What `inlay calibrate --stream` does."""

from pathlib import Path
from typing import Any

from inlay.cli.outcome import interrupted, show_result
from inlay.cli.recipes import Wanted
from inlay.errors import ConfigurationError
from inlay.ranks.identity import is_first

__all__ = ["run_streamed"]


def run_streamed(
    model: str,
    wanted: Wanted,
    data: Path | None,
    dtype: str,
    source: dict[str, Any],
    settings: dict[str, Any],
    *,
    quiet: bool,
) -> None:
    """Stream a model from its folder to another, and say what came out.

    :param source: what may be done to load the model
    :param settings: the options of `inlay.stream`
    """
    options = dict(source)
    if options.pop("gguf_file") is not None:
        raise ConfigurationError(
            "--stream reads weights from safetensors, not from GGUF; save the model in that format "
            "with save_pretrained, or leave --stream out"
        )
    from inlay.checkpoint.stored_model import StoredModel
    from inlay.engine.stream import stream
    from inlay.engine.streamed.journal import work_folder

    stored = StoredModel.open(model, dtype=dtype, **options)
    try:
        streamed = stream(stored, wanted.recipe_for(stored.model), data, **settings)
    except KeyboardInterrupt:
        interrupted(work_folder(settings["out"]), "blocks")
    if is_first() and not quiet:
        show_result(streamed, settings["out"])
