"""The folders that a command reads and writes."""

import os
from pathlib import Path

from inlay.checkpoint.source import Source
from inlay.cli.arguments import RecipeOptions
from inlay.errors import ConfigurationError
from inlay.options import LoadOptions, keywords_of

__all__ = ["proposed", "require_apart", "source_of", "statistics_folder"]


def proposed(model: str, options: RecipeOptions) -> Path:
    """Return the folder to write if the user names none: that of the model, and its scheme."""
    name = os.path.basename(os.path.realpath(os.path.expanduser(model)))
    scheme = options.scheme or (options.recipe.stem if options.recipe is not None else "quantized")
    return Path(f"{name}-{scheme}")


def source_of(model: str, options: LoadOptions) -> Source:
    """Return the source of a model; refuse a missing folder."""
    source = Source(place=os.path.expanduser(model), **keywords_of(options, LoadOptions))
    source.require_config()
    return source


def require_apart(out: Path, *sources: str | Path) -> None:
    """Refuse to write over anything that the command reads, even with --overwrite."""
    for origin in map(Path, sources):
        if origin.exists() and out.resolve() in (origin.resolve(), *origin.resolve().parents):
            raise ConfigurationError(f"{out} holds {origin}, which is read; name another folder")


def statistics_folder(out: Path) -> Path:
    """Return the folder beside `out` that keeps the statistics while a run goes on."""
    place = Path(os.path.abspath(out)) if out.name in ("", "..") else out
    return place.with_name(f"{place.name}.statistics")
