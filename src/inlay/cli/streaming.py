"""What `inlay calibrate --stream` does."""

from pathlib import Path
from typing import Any, NoReturn

import typer

from inlay.cli.outcome import show_result
from inlay.cli.recipes import Wanted
from inlay.cli.terminal import tell
from inlay.errors import ConfigurationError

__all__ = ["run_streamed"]


def run_streamed(
    model: str,
    wanted: Wanted,
    data: Path | None,
    out: Path,
    *,
    source: dict[str, Any],
    dtype: str,
    offload_activations: bool,
    overwrite: bool,
    report: bool,
    quiet: bool,
    settings: dict[str, Any],
) -> None:
    """Stream a model from its folder to another, and say what came out.

    :param source: what may be done to load the model
    :param settings: the options of `inlay.stream` that those of `inlay.calibrate` share
    """
    options = dict(source)
    if options.pop("gguf_file") is not None:
        raise ConfigurationError(
            "--stream reads weights from safetensors, not from GGUF; save the model in that format "
            "with save_pretrained, or leave --stream out"
        )
    from inlay.checkpoint.stored_model import StoredModel
    from inlay.streaming.journal import work_folder
    from inlay.streaming.stream import stream

    stored = StoredModel.open(model, dtype=dtype, **options)
    try:
        streamed = stream(
            stored,
            wanted.recipe_for(stored.model),
            data,
            out=out,
            offload_activations=offload_activations,
            overwrite=overwrite,
            report=report,
            **settings,
        )
    except KeyboardInterrupt:
        _interrupted(work_folder(out))
    if not quiet:
        show_result(streamed, out)


def _interrupted(folder: Path) -> NoReturn:
    if folder.exists():
        tell(f"interrupted; {folder} holds the blocks written so far: continue with --resume")
    else:
        tell("interrupted before anything was written")
    raise typer.Exit(130)
