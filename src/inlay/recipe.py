"""The recipe: what to quantize and how."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pydantic
import yaml
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    is_preset_scheme,
    preset_name_to_scheme,
)
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES

from inlay.errors import ConfigurationError
from inlay.observers import Observer

__all__ = ["Recipe", "default_observer", "make_observer", "preset_names"]

# compressed-tensors has no preset for static int8 activations.
_OWN_PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    "W8A8_STATIC": {
        "weights": {"num_bits": 8, "strategy": "channel", "symmetric": True},
        "input_activations": {"num_bits": 8, "strategy": "tensor", "symmetric": False},
    },
}
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
_OWN_FIELDS = ("ignore", "inputs", "kv_cache", "outputs", "preset", "targets", "weights")
_PARTS = {"weights": "weights", "inputs": "input_activations", "outputs": "output_activations"}

Overrides = Any  # QuantizationArgs, or a mapping of their fields


def preset_names() -> list[str]:
    """Names that `Recipe.from_preset` takes."""
    return sorted({*PRESET_SCHEMES, *_OWN_PRESETS})


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
        """A preset of compressed-tensors, or `W8A8_STATIC`, with changes.

        :param targets: names, class names or `re:` patterns of modules, as in compressed-tensors
        :param ignore: targets to leave out
        :param weights: fields of `QuantizationArgs` to change, the observer and its kwargs included
        :param inputs: the same for input activations
        :param outputs: the same for output activations, which no preset quantizes by itself
        :param kv_cache: `QuantizationArgs` of keys and values
        """
        scheme = _preset(name, _names(targets, "targets"))
        changes = {"weights": weights, "inputs": inputs, "outputs": outputs}
        parts = {
            _PARTS[part]: _change(getattr(scheme, _PARTS[part]), change, part)
            for part, change in changes.items()
        }
        scheme = _checked(QuantizationScheme, targets=scheme.targets, format=scheme.format, **parts)
        return cls(
            _checked(
                QuantizationConfig,
                config_groups={"group_0": scheme},
                ignore=_names(ignore, "ignore"),
                kv_cache_scheme=_change(None, kv_cache, "kv_cache"),
            )
        )

    @classmethod
    def from_config(cls, config: QuantizationConfig | Mapping[str, Any]) -> "Recipe":
        """The recipe of a `QuantizationConfig`, which is copied, or of its fields.

        A group may be the name of a preset and its targets: `{"W8A8": ["Linear"]}`.
        """
        if isinstance(config, QuantizationConfig):
            return cls(config.model_copy(deep=True))
        return cls(_checked(QuantizationConfig, **_with_presets(config)))

    @classmethod
    def from_yaml(cls, source: str | Path) -> "Recipe":
        """A recipe from a YAML file, or from the text of one.

        It has the arguments of `from_preset`, or it is a `QuantizationConfig`, or a recipe of
        llm-compressor with a `QuantizationModifier`.
        """
        text, place = _read(source)
        try:
            content = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigurationError(f"{place} is not YAML: {error}") from error
        if not isinstance(content, dict):
            raise ConfigurationError(f"{place} holds no recipe: expected a mapping of settings")
        modifiers = _find_modifiers(content)
        if modifiers:
            return _from_modifiers(modifiers, place)
        if "config_groups" in content:
            return cls.from_config(content)
        _require_known(content, _OWN_FIELDS, place)
        if "preset" not in content:
            raise ConfigurationError(
                f"{place} names no preset; add `preset:` with one of {', '.join(preset_names())}"
            )
        settings = dict(content)
        return cls.from_preset(settings.pop("preset"), **settings)


def default_observer(base_name: str) -> str:
    """The observer of a slot for which the recipe names none, as in llm-compressor."""
    return "memoryless_minmax" if base_name == "weight" else "minmax"


def make_observer(base_name: str, args: QuantizationArgs) -> Observer:
    """The observer that `args` name, or the usual one for weights or activations."""
    name = args.observer or default_observer(base_name)
    observer = Observer.load_from_registry(name, base_name=base_name, args=args)
    assert isinstance(observer, Observer)
    return observer


def _observed_parts(scheme: QuantizationScheme) -> list[tuple[str, QuantizationArgs]]:
    parts = [
        ("weight", scheme.weights),
        ("input", scheme.input_activations),
        ("output", scheme.output_activations),
    ]
    return [(name, args) for name, args in parts if args is not None and args.dynamic is not True]


def _preset(name: str, targets: list[str]) -> QuantizationScheme:
    if name.upper() in _OWN_PRESETS:
        return QuantizationScheme(targets=targets, **_OWN_PRESETS[name.upper()])
    if not is_preset_scheme(name):
        raise ConfigurationError(
            f"there is no preset {name!r}; there are {', '.join(preset_names())}"
        )
    return preset_name_to_scheme(name, targets)


def _with_presets(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a config, with groups that name a preset written out."""
    groups = fields.get("config_groups")
    if not isinstance(groups, Mapping):
        return dict(fields)
    written_out = {
        name: _preset(name, group) if isinstance(group, list) else group
        for name, group in groups.items()
    }
    return {**fields, "config_groups": written_out}


def _change(
    args: QuantizationArgs | None, change: Overrides | None, part: str
) -> QuantizationArgs | None:
    if change is None:
        return args
    if isinstance(change, QuantizationArgs):
        return change.model_copy(deep=True)
    if not isinstance(change, Mapping):
        raise ConfigurationError(
            f"{part} must be QuantizationArgs or a mapping of their fields, got {change!r}"
        )
    fields = {} if args is None else {name: getattr(args, name) for name in _fields(args)}
    # What follows from other fields is worked out anew where those change.
    if {"num_bits", "type", "symmetric"} & set(change):
        fields.pop("zp_dtype", None)
    if "strategy" in change or "group_size" in change:
        for name in ("strategy", "group_size", "block_structure"):
            fields.pop(name, None)
        if change.get("strategy") in ("group", "tensor_group") and args is not None:
            fields["group_size"] = args.group_size
        if "strategy" not in change and args is not None and args.strategy == "tensor_group":
            fields["strategy"] = args.strategy
    return _checked(QuantizationArgs, **{**fields, **change})


def _fields(args: QuantizationArgs) -> list[str]:
    return list(type(args).model_fields)


def _checked(model: type[Any], **fields: Any) -> Any:
    """Build a pydantic model of compressed-tensors, with errors that list what it takes."""
    try:
        return model(**fields)
    except (pydantic.ValidationError, NotImplementedError, ValueError, TypeError) as error:
        allowed = ", ".join(sorted(model.model_fields))
        raise ConfigurationError(
            f"{model.__name__}: {_first_problem(error)}. Its fields are {allowed}"
        ) from error


def _first_problem(error: Exception) -> str:
    if not isinstance(error, pydantic.ValidationError):
        return str(error)
    problem = error.errors()[0]
    return f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}"


def _names(value: Iterable[str], field: str) -> list[str]:
    names = [value] if isinstance(value, str) else list(value)
    if not all(isinstance(name, str) for name in names):
        raise ConfigurationError(f"{field} must be names of modules, got {names!r}")
    return names


def _read(source: str | Path) -> tuple[str, str]:
    if isinstance(source, str) and "\n" in source:
        return source, "the recipe"
    try:
        return Path(source).read_text(), str(source)
    except OSError as error:
        raise ConfigurationError(f"cannot read the recipe {source}: {error.strerror}") from error


def _find_modifiers(content: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Modifiers of a llm-compressor recipe, at whatever depth of stages they stand."""
    found: dict[str, dict[str, Any]] = {}
    for name, value in content.items():
        if not isinstance(value, dict):
            continue
        if str(name).endswith("Modifier"):
            found[name] = value
        else:
            found.update(_find_modifiers(value))
    return found


def _from_modifiers(modifiers: dict[str, dict[str, Any]], place: str) -> Recipe:
    others = sorted(set(modifiers) - {"QuantizationModifier"})
    if others:
        raise ConfigurationError(
            f"{place} has {', '.join(others)}; only QuantizationModifier is calibration"
        )
    fields = modifiers["QuantizationModifier"]
    _require_known(fields, _MODIFIER_FIELDS, f"QuantizationModifier in {place}")
    groups = fields.get("config_groups")
    targets = _names(fields.get("targets", ["Linear"]), "targets")
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
    return Recipe.from_config(
        {
            "config_groups": {
                name: _with_observers(group, observers) for name, group in groups.items()
            },
            "ignore": _names(fields.get("ignore", []), "ignore"),
            "kv_cache_scheme": fields.get("kv_cache_scheme"),
        }
    )


def _groups_of_scheme(scheme: Any, targets: list[str], place: str) -> dict[str, Any]:
    """The three forms of `scheme`: a preset's name, parts of a scheme, presets with targets."""
    if isinstance(scheme, str):
        return {"group_0": _preset(scheme, targets)}
    if isinstance(scheme, dict) and set(scheme) & set(_PARTS.values()):
        return {"group_0": _checked(QuantizationScheme, targets=targets, **scheme)}
    if isinstance(scheme, dict) and scheme:
        return {
            f"group_{index}": _preset(name, _names(own, "targets"))
            for index, (name, own) in enumerate(scheme.items())
        }
    raise ConfigurationError(
        f"{place} has no scheme; add `scheme:` with a preset's name or with `weights:` and so on"
    )


def _with_observers(group: Any, observers: Mapping[str, str]) -> QuantizationScheme:
    if not isinstance(group, QuantizationScheme):
        group = _checked(QuantizationScheme, **group)
    changed = group.model_copy(deep=True)
    aliases = {
        "weights": "weights",
        "weight": "weights",
        "input": "input_activations",
        "output": "output_activations",
    }
    for part, name in observers.items():
        _require_known({part: name}, tuple(aliases), "observer")
        args = getattr(changed, aliases[part])
        if args is not None:
            args.observer = name
    return changed


def _require_known(fields: Mapping[str, Any], known: tuple[str, ...], place: str) -> None:
    unknown = sorted(set(map(str, fields)) - set(known))
    if unknown:
        raise ConfigurationError(
            f"{place} has {', '.join(unknown)}, which is not known; known are {', '.join(known)}"
        )
