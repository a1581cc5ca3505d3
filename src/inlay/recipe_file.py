"""Read the YAML of a recipe, and refuse what cannot be one. Importing this takes no time."""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from inlay.errors import ConfigurationError

__all__ = ["find_modifiers", "read_recipe", "require_known"]

_GROUPS = "config_groups"
# The arguments of `Recipe.from_preset`.
_OWN_FIELDS = (
    "equalize",
    "experts",
    "gptq",
    "ignore",
    "inputs",
    "kv_cache",
    "outputs",
    "preset",
    "targets",
    "weights",
)


def read_recipe(source: str | Path) -> tuple[dict[str, Any], str]:
    """Read a recipe from a YAML file, or from the text of one.

    :return: its content, and its place for errors
    :raises ConfigurationError: if it is not a mapping, or has entries that no recipe has
    """
    text, place = _text(source)
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigurationError(f"{place} is not YAML: {error}") from error
    if not isinstance(content, dict):
        raise ConfigurationError(f"{place} holds no recipe: expected a mapping of settings")
    if _GROUPS not in content and not find_modifiers(content):
        require_known(content, _OWN_FIELDS, place, others=(_GROUPS,))
    return content, place


def find_modifiers(content: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Collect the modifiers of an llm-compressor recipe, at any depth of stages."""
    found: dict[str, dict[str, Any]] = {}
    for name, value in content.items():
        if not isinstance(value, dict):
            continue
        if str(name).endswith("Modifier"):
            found[name] = value
        else:
            found.update(find_modifiers(value))
    return found


def require_known(
    fields: Mapping[str, Any], known: Sequence[str], place: str, others: Sequence[str] = ()
) -> None:
    """Refuse entries that are not known.

    :param others: further names that may have been meant
    """
    unknown = sorted(set(map(str, fields)) - set(known))
    if unknown:
        close = get_close_matches(unknown[0], [*known, *others], n=1)
        hint = f". Did you mean {close[0]}?" if close else ""
        raise ConfigurationError(
            f"{place} has unknown entries: {', '.join(unknown)}; use only {', '.join(known)}{hint}"
        )


def _text(source: str | Path) -> tuple[str, str]:
    if isinstance(source, str) and "\n" in source:
        return source, "the recipe"
    try:
        return Path(source).read_text(encoding="utf-8"), str(source)
    except OSError as error:
        raise ConfigurationError(f"cannot read the recipe {source}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(
            f"the recipe {source} is not UTF-8: {error.reason} at byte {error.start + 1}; save the "
            "file as UTF-8"
        ) from error
