"""Read recipes of llm-compressor: translate the modifiers in their YAML."""

import warnings
from collections.abc import Mapping
from typing import Any

from compressed_tensors.quantization import QuantizationScheme

from inlay.compensation.settings import GPTQ
from inlay.errors import ConfigurationError
from inlay.recipe.presets import checked, names_of, preset
from inlay.recipe_file import require_known

__all__ = ["config_of_modifiers"]

_MODIFIER_FIELDS = (
    "config_groups",
    "ignore",
    "input_observer",
    "kv_cache_scheme",
    "observer",
    "output_observer",
    "scheme",
    "targets",
    "weight_observer",
)
_GPTQ_FIELDS = ("actorder", "batched_quantization", "block_size", "dampening_frac")
_STATIC = (None, "static", "weight")  # the order of columns that Inlay takes
_SMOOTHING_FIELDS = (
    "calibration_function",
    "mappings",
    "num_calibration_steps",
    "smoothing_strength",
)
_SMOOTHING_STRENGTH = 0.5  # the default of SmoothQuantModifier
_SCHEME_PARTS = ("weights", "input_activations", "output_activations")


def config_of_modifiers(modifiers: dict[str, dict[str, Any]], place: str) -> dict[str, Any]:
    """Translate modifiers to the fields of a `QuantizationConfig`, `equalize` and `gptq`."""
    quantizing = sorted(set(modifiers) - {"SmoothQuantModifier"})
    if quantizing not in (["GPTQModifier"], ["QuantizationModifier"]):
        raise ConfigurationError(
            f"{place} has {', '.join(sorted(modifiers))}; Inlay reads one QuantizationModifier or "
            "one GPTQModifier, with or without SmoothQuantModifier"
        )
    (name,) = quantizing
    fields = dict(modifiers[name])
    gptq = _gptq(fields, place) if name == "GPTQModifier" else None
    require_known(fields, _MODIFIER_FIELDS, f"{name} in {place}")
    groups = fields.get("config_groups")
    targets = names_of(fields.get("targets", ["Linear"]), "targets")
    if groups is None:
        groups = _groups_of_scheme(fields.get("scheme"), targets, place)
    observers = {
        **(fields.get("observer") or {}),
        **{
            part: fields[f"{singular}_observer"]
            for part, singular in [("weights", "weight"), ("input", "input"), ("output", "output")]
            if fields.get(f"{singular}_observer") is not None
        },
    }
    return {
        "config_groups": {
            name: _with_observers(group, observers) for name, group in groups.items()
        },
        "ignore": names_of(fields.get("ignore", []), "ignore"),
        "kv_cache_scheme": fields.get("kv_cache_scheme"),
        "equalize": _strength(modifiers.get("SmoothQuantModifier"), place),
        "gptq": gptq,
    }


def _gptq(fields: dict[str, Any], place: str) -> dict[str, Any]:
    """Take the settings of GPTQ out of a GPTQModifier's fields.

    How many columns or layers are solved at a time only decides how long solving takes.
    """
    own = {name: fields.pop(name) for name in _GPTQ_FIELDS if name in fields}
    if own.get("actorder") not in _STATIC:
        raise ConfigurationError(
            f"GPTQModifier in {place} asks for actorder {own['actorder']!r}; Inlay orders columns "
            "statically. Remove the line, or set it to static"
        )
    return {"damping": GPTQ.of_llmcompressor(own.get("dampening_frac")).damping}


def _strength(fields: Mapping[str, Any] | None, place: str) -> Any:
    """Read how strongly SmoothQuant scales channels; None without it."""
    if fields is None:
        return None
    require_known(fields, _SMOOTHING_FIELDS, f"SmoothQuantModifier in {place}")
    if fields.get("mappings"):
        warnings.warn(
            f"{place}: SmoothQuantModifier's mappings are not needed and not read: Inlay finds in "
            "the graph what can be scaled",
            stacklevel=4,
        )
    return fields.get("smoothing_strength", _SMOOTHING_STRENGTH)


def _groups_of_scheme(scheme: Any, targets: list[str], place: str) -> dict[str, Any]:
    """Read the forms of `scheme`: a preset's name, parts of a scheme, presets with targets."""
    if isinstance(scheme, str):
        return {"group_0": preset(scheme, targets)}
    if isinstance(scheme, dict) and set(scheme) & set(_SCHEME_PARTS):
        return {"group_0": checked(QuantizationScheme, targets=targets, **scheme)}
    if isinstance(scheme, dict) and scheme:
        return {
            f"group_{index}": preset(name, names_of(own, "targets"))
            for index, (name, own) in enumerate(scheme.items())
        }
    raise ConfigurationError(
        f"{place} has no scheme; add `scheme:` with a preset's name, or with `weights:`, "
        "`input_activations:` or `output_activations:`"
    )


def _with_observers(group: Any, observers: Mapping[str, str]) -> QuantizationScheme:
    if not isinstance(group, QuantizationScheme):
        group = checked(QuantizationScheme, **group)
    changed = group.model_copy(deep=True)
    aliases = {
        "weights": "weights",
        "weight": "weights",
        "input": "input_activations",
        "output": "output_activations",
    }
    for part, name in observers.items():
        require_known({part: name}, tuple(aliases), "observer")
        args = getattr(changed, aliases[part])
        if args is not None:
            args.observer = name
    return changed
