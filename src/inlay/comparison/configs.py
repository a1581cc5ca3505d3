"""Differences of the configs of two models."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from inlay.checkpoint.source import Source
from inlay.errors import InlayError
from inlay.report.data import Finding

__all__ = ["config_differences", "shown"]

# What quantizing or saving changes, and what predictions do not depend on.
_UNRELATED = {
    "_name_or_path",
    "dtype",
    "quantization_config",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}
_GENERATION = "generation_config.json"
_LENGTH = 80


def config_differences(a: Source, b: Source, *, served: bool) -> Iterator[Finding]:
    """Find fields of the configs, and end tokens, in which two models differ.

    :param served: whether a server runs B, which may know a model that transformers does not
    """
    try:
        first, second = (side.config().to_dict() for side in (a, b))
    except InlayError:
        if not served:
            return  # loading names the problem
        first, second = (_read(side, "config.json") for side in (a, b))
    yield from _fields("config.json", _flat(first), _flat(second))
    first, second = (_read(side, _GENERATION) for side in (a, b))
    ends = [{k: v for k, v in each.items() if k.endswith("_token_id")} for each in (first, second)]
    if all(ends):
        yield from _fields(_GENERATION, *ends)


def _fields(file: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[Finding]:
    for name in sorted(a.keys() | b.keys()):
        if a.get(name) != b.get(name):
            yield Finding(
                severity="warning",
                about=file,
                text=f"{name} is {shown(a.get(name))} in A and {shown(b.get(name))} in B.",
            )


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in config.items():
        if name in _UNRELATED:
            continue
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


def _read(source: Source, name: str) -> dict[str, Any]:
    if not source.is_folder and source.download:
        return {}
    path = source.folder() / name
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def shown(value: Any) -> str:
    """Return a value as text that is not too long."""
    text = repr(value)
    return text if len(text) <= _LENGTH else f"{text[:_LENGTH]}…"
