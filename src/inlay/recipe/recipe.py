"""The recipe, which says what to quantize and how."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
)

from inlay.errors import ConfigurationError
from inlay.recipe.llmcompressor_yaml import config_of_modifiers, find_modifiers
from inlay.recipe.presets import (
    Overrides,
    change,
    checked,
    names_of,
    preset,
    preset_names,
    require_known,
)
from inlay.recipe.slot import make_observer

__all__ = ["Recipe"]

_OWN_FIELDS = ("ignore", "inputs", "kv_cache", "outputs", "preset", "targets", "weights")
_PARTS = {"weights": "weights", "inputs": "input_activations", "outputs": "output_activations"}


@dataclass(frozen=True)
class Recipe:
    """A validated quantization config. Make one with `from_preset`, `from_config`, `from_yaml`."""

    config: QuantizationConfig

    def __post_init__(self) -> None:
        for scheme in self.config.config_groups.values():
            for base_name, args in _observed_parts(scheme):
                make_observer(base_name, args)
        if self.config.kv_cache_scheme is not None:
            make_observer("k", self.config.kv_cache_scheme)

    @classmethod
    def from_preset(
        cls,
        name: str,
        *,
        targets: Iterable[str] = ("Linear",),
        ignore: Iterable[str] = (),
        weights: Overrides | None = None,
        inputs: Overrides | None = None,
        outputs: Overrides | None = None,
        kv_cache: Overrides | None = None,
    ) -> "Recipe":
        """Make a recipe from a preset of compressed-tensors, or `W8A8_STATIC`, with changes.

        :param targets: names, class names or `re:` patterns of modules, as in compressed-tensors
        :param ignore: targets to leave out
        :param weights: fields of `QuantizationArgs` to change, the observer and its kwargs included
        :param inputs: the same for input activations
        :param outputs: the same for output activations, which no preset quantizes by itself
        :param kv_cache: `QuantizationArgs` of keys and values
        """
        scheme = preset(name, names_of(targets, "targets"))
        changes = {"weights": weights, "inputs": inputs, "outputs": outputs}
        parts = {
            _PARTS[part]: change(getattr(scheme, _PARTS[part]), wanted, part)
            for part, wanted in changes.items()
        }
        scheme = checked(QuantizationScheme, targets=scheme.targets, format=scheme.format, **parts)
        return cls(
            checked(
                QuantizationConfig,
                config_groups={"group_0": scheme},
                ignore=names_of(ignore, "ignore"),
                kv_cache_scheme=change(None, kv_cache, "kv_cache"),
            )
        )

    @classmethod
    def from_config(cls, config: QuantizationConfig | Mapping[str, Any]) -> "Recipe":
        """Make a recipe from a `QuantizationConfig`, which is copied, or from its fields.

        A group may name a preset and list its targets: `{"W8A8": ["Linear"]}`.
        """
        if isinstance(config, QuantizationConfig):
            return cls(config.model_copy(deep=True))
        return cls(checked(QuantizationConfig, **_with_presets(config)))

    @classmethod
    def from_yaml(cls, source: str | Path) -> "Recipe":
        """Read a recipe from a YAML file, or from the text of one.

        The YAML holds the arguments of `from_preset`, a `QuantizationConfig`, or a recipe of
        llm-compressor with a `QuantizationModifier`.
        """
        text, place = _read(source)
        try:
            content = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigurationError(f"{place} is not YAML: {error}") from error
        if not isinstance(content, dict):
            raise ConfigurationError(f"{place} holds no recipe: expected a mapping of settings")
        modifiers = find_modifiers(content)
        if modifiers:
            return cls.from_config(config_of_modifiers(modifiers, place))
        if "config_groups" in content:
            return cls.from_config(content)
        require_known(content, _OWN_FIELDS, place)
        if "preset" not in content:
            raise ConfigurationError(
                f"{place} names no preset; add `preset:` with one of {', '.join(preset_names())}"
            )
        settings = dict(content)
        return cls.from_preset(settings.pop("preset"), **settings)


def _observed_parts(scheme: QuantizationScheme) -> list[tuple[str, QuantizationArgs]]:
    parts = [
        ("weight", scheme.weights),
        ("input", scheme.input_activations),
        ("output", scheme.output_activations),
    ]
    return [(name, args) for name, args in parts if args is not None and args.dynamic is not True]


def _with_presets(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Write out the groups of a config that name a preset."""
    groups = fields.get("config_groups")
    if not isinstance(groups, Mapping):
        return dict(fields)
    written_out = {
        name: preset(name, group) if isinstance(group, list) else group
        for name, group in groups.items()
    }
    return {**fields, "config_groups": written_out}


def _read(source: str | Path) -> tuple[str, str]:
    if isinstance(source, str) and "\n" in source:
        return source, "the recipe"
    try:
        return Path(source).read_text(), str(source)
    except OSError as error:
        raise ConfigurationError(f"cannot read the recipe {source}: {error.strerror}") from error
