"""The recipe, which says what to quantize and how."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
)
from torch import nn

from inlay.compensation.settings import GPTQ
from inlay.errors import ConfigurationError
from inlay.formats.numbers import format_of
from inlay.formats.storage import require_storable
from inlay.model import modules_with_stacks
from inlay.recipe.kept import kept_modules
from inlay.recipe.llmcompressor_yaml import config_of_modifiers
from inlay.recipe.presets import (
    METHODS,
    Method,
    Overrides,
    change,
    checked,
    has_static_inputs,
    names_of,
    preset,
    preset_names,
    with_best_rounding,
)
from inlay.recipe.slot import make_observer
from inlay.recipe_file import find_modifiers, read_recipe

__all__ = ["AUTO_STRENGTH", "EXPERTS", "Experts", "Recipe", "Strength"]

AUTO_STRENGTH: Literal["auto"] = "auto"
# How much of the size of a channel moves into the weights: a number, or chosen for each value.
Strength = float | Literal["auto"]
# Which tokens the scales of an expert's inputs rest on.
Experts = Literal["routed", "fill", "layer", "all"]
EXPERTS: dict[Experts, str] = {
    "routed": "those that the model sends to it",
    "fill": "the same, and those of its layer where these are few",
    "layer": "those of its layer, whichever expert they were sent to",
    "all": "all tokens, each sent through every expert to calibrate it",
}

# Fields that a QuantizationConfig does not have.
_OPTIONS = ("equalize", "experts", "gptq", "keeps_head")
_EXACT = "static_minmax"  # the observer of inputs that are equalized, if none is named
_PARTS = {"weights": "weights", "inputs": "input_activations", "outputs": "output_activations"}


@dataclass(frozen=True)
class Recipe:
    """A validated quantization config. Make one with `from_preset`, `from_config`, `from_yaml`.

    :param equalize: how much of the size of outlier channels moves from inputs into weights before
        both are quantized, from 0 to 1, or "auto"; None to leave them as they are
    :param experts: which tokens the scales of an expert's inputs rest on, of `EXPERTS`
    :param preset_observers: the parts of schemes whose observer a preset names and nobody else, so
        that statistics of another observer serve as well
    :param gptq: how the rounding errors of weights are compensated; None to round to nearest
    :param keeps_head: whether the output layer of a language model is ignored, see `for_model`
    """

    config: QuantizationConfig
    equalize: Strength | None = None
    experts: Experts = "routed"
    preset_observers: frozenset[str] = frozenset()
    gptq: GPTQ | None = None
    keeps_head: bool = False

    def __post_init__(self) -> None:
        _require_strength(self.equalize)
        _require_experts(self.experts)
        _require_formats(self.config)
        if self.equalize is not None:
            object.__setattr__(self, "config", _with_exact_ranges(self.config))
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
        ignore: Iterable[str] | None = None,
        weights: Overrides | None = None,
        inputs: Overrides | None = None,
        outputs: Overrides | None = None,
        kv_cache: Overrides | None = None,
        equalize: Strength | None = None,
        experts: Experts = "routed",
        gptq: GPTQ | Mapping[str, Any] | bool | None = None,
        method: Method = "plain",
    ) -> "Recipe":
        """Make a recipe from a preset of compressed-tensors, or `W8A8_STATIC`, with changes.

        :param targets: names, class names or `re:` patterns of modules, as in compressed-tensors
        :param ignore: targets to leave out. By default these are the heads of language models
            (`lm_head`) and classifiers, where errors show most, and what brings images and sound
            to a language model; `()` quantizes them
        :param weights: fields of `QuantizationArgs` to change, the observer and its kwargs included
        :param inputs: the same for input activations
        :param outputs: the same for output activations, which no preset quantizes by itself
        :param kv_cache: `QuantizationArgs` of keys and values
        :param equalize: see `Recipe`
        :param experts: see `Recipe`
        :param gptq: see `Recipe`; true for the default settings, or a mapping of settings
        :param method: "plain" keeps llm-compressor's defaults where no observer is named; "best"
            chooses as `inlay calibrate --data` does, see `with_best_method`
        """
        if method not in METHODS:
            raise ConfigurationError(
                f"there is no method {method!r}; use one of {', '.join(METHODS)}"
            )
        scheme = preset(name, names_of(targets, "targets"))
        changes = {"weights": weights, "inputs": inputs, "outputs": outputs}
        parts = {
            _PARTS[part]: change(getattr(scheme, _PARTS[part]), wanted, part)
            for part, wanted in changes.items()
        }
        named = {_PARTS[part] for part, wanted in changes.items() if _names_observer(wanted)}
        of_preset = {part for part in parts if getattr(getattr(scheme, part), "observer", None)}
        scheme = checked(QuantizationScheme, targets=scheme.targets, format=scheme.format, **parts)
        recipe = cls(
            checked(
                QuantizationConfig,
                config_groups={"group_0": scheme},
                ignore=names_of(ignore or (), "ignore"),
                kv_cache_scheme=change(None, kv_cache, "kv_cache"),
            ),
            equalize,
            experts,
            frozenset(of_preset - named),
            GPTQ.of(gptq),
            keeps_head=ignore is None,
        )
        return recipe.with_best_method(has_data=True) if method == "best" else recipe

    def with_best_method(self, *, has_data: bool, model: nn.Module | None = None) -> "Recipe":
        """Choose the best method for the parts of schemes whose observer nobody named.

        Weights of 4 bits or fewer take GPTQ with ranges by `imatrix_mse`; without data, ranges by
        `memoryless_mse`. Static integer inputs are equalized, and observed by `static_minmax`.
        Unlike those of a moving average, their scales depend neither on the order of the data nor
        on the number of ranks.

        :param model: the model to quantize, if it is known. With experts, weights take GPTQ only if
            the recipe asks for it: few texts reach all experts, and their Hessians take much memory
        """
        has_experts = model is not None and any(True for _ in modules_with_stacks(model))
        gathers = has_data and (self.gptq is not None or not has_experts)
        config, gptq = with_best_rounding(self.config, self.gptq, has_data=gathers)
        is_static = any(map(has_static_inputs, config.config_groups.values()))
        strength = "auto" if self.equalize is None and has_data and is_static else self.equalize
        return replace(self, config=config, gptq=gptq, equalize=strength)

    @classmethod
    def of(cls, wanted: "Recipe | str", model: nn.Module, *, has_data: bool) -> "Recipe":
        """Return a recipe for a model. The name of a preset stands for its best method."""
        if isinstance(wanted, cls):
            return wanted.for_model(model)
        if not isinstance(wanted, str):
            raise ConfigurationError(
                f"a recipe is a Recipe or the name of a preset, not {type(wanted).__name__}"
            )
        recipe = cls.from_preset(wanted).for_model(model)
        return recipe.with_best_method(has_data=has_data, model=model)

    @classmethod
    def from_config(
        cls,
        config: QuantizationConfig | Mapping[str, Any],
        *,
        equalize: Strength | None = None,
        experts: Experts | None = None,
        gptq: GPTQ | Mapping[str, Any] | bool | None = None,
    ) -> "Recipe":
        """Make a recipe from a `QuantizationConfig`, which is copied, or from its fields.

        A group may name a preset and list its targets: `{"W8A8": ["Linear"]}`.

        :param equalize: see `Recipe`; fields may also have it
        :param experts: the same
        :param gptq: the same
        """
        own: dict[str, Any] = {}
        if isinstance(config, QuantizationConfig):
            config = config.model_copy(deep=True)
        else:
            fields = _with_presets(config)
            own = {name: fields.pop(name) for name in _OPTIONS if name in fields}
            config = checked(QuantizationConfig, **fields)
        given = {"equalize": equalize, "experts": experts, "gptq": gptq}
        own.update({name: value for name, value in given.items() if value is not None})
        return cls(config, **{**own, "gptq": GPTQ.of(own.get("gptq"))})

    def for_model(self, model: nn.Module) -> "Recipe":
        """Return the recipe for one model, ignoring heads and towers if the recipe keeps these.

        What a target names is not kept.
        """
        if not self.keeps_head:
            return self
        config: QuantizationConfig = self.config.model_copy(deep=True)
        named = {target for scheme in config.config_groups.values() for target in scheme.targets}
        ignored = [*(config.ignore or []), *kept_modules(model, named)]
        config.ignore = list(dict.fromkeys(ignored))
        return replace(self, config=config, keeps_head=False)

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of the config, and what is set of the recipe's own, as JSON keeps them."""
        return {**self.config.model_dump(mode="json"), **self.own_fields}

    @property
    def own_fields(self) -> dict[str, Any]:
        """What is set of the fields that a config does not have."""
        own: dict[str, Any] = {} if self.equalize is None else {"equalize": self.equalize}
        if self.experts != "routed":
            own["experts"] = self.experts
        if self.gptq is not None:
            own["gptq"] = self.gptq.fields
        if self.keeps_head:
            own["keeps_head"] = True
        return own

    @classmethod
    def from_yaml(
        cls,
        source: str | Path,
        *,
        equalize: Strength | None = None,
        experts: Experts | None = None,
        gptq: GPTQ | Mapping[str, Any] | bool | None = None,
    ) -> "Recipe":
        """Read a recipe from a YAML file, or from the text of one.

        The YAML holds the arguments of `from_preset`, a `QuantizationConfig`, or a recipe of
        llm-compressor with a `QuantizationModifier`.

        :param equalize: see `Recipe`; it goes before what the YAML says
        :param experts: the same
        :param gptq: the same
        """
        content, place = read_recipe(source)
        modifiers = find_modifiers(content)
        if modifiers:
            content = config_of_modifiers(modifiers, place)
        if "config_groups" in content:
            return cls.from_config(content, equalize=equalize, experts=experts, gptq=gptq)
        if "preset" not in content:
            raise ConfigurationError(
                f"{place} names no preset; add `preset:` with one of {', '.join(preset_names())}"
            )
        settings = {"ignore": (), **content}  # as llm-compressor reads it
        given = {"equalize": equalize, "experts": experts, "gptq": gptq}
        settings.update({name: value for name, value in given.items() if value is not None})
        return cls.from_preset(settings.pop("preset"), **settings)


def _names_observer(wanted: Overrides | None) -> bool:
    return isinstance(wanted, QuantizationArgs) or "observer" in (wanted or {})


def _require_strength(strength: Any) -> None:
    is_number = isinstance(strength, (int, float)) and not isinstance(strength, bool)
    if strength in (None, AUTO_STRENGTH) or (is_number and 0 <= strength <= 1):
        return
    raise ConfigurationError(f'equalize must be a number from 0 to 1, or "auto", not {strength!r}')


def _require_experts(experts: Any) -> None:
    if experts not in EXPERTS:
        known = "; ".join(f"{name}: {meaning}" for name, meaning in EXPERTS.items())
        raise ConfigurationError(
            f"experts says which tokens the scales of an expert rest on: {known}. "
            f"There is no {experts!r}"
        )


def _require_formats(config: QuantizationConfig) -> None:
    """Refuse number formats that are unknown, and weights that cannot be stored."""
    for scheme in config.config_groups.values():
        for args in (scheme.weights, scheme.input_activations, scheme.output_activations):
            if args is not None:
                format_of(args)
        if scheme.weights is not None:
            require_storable(scheme.weights)
    if config.kv_cache_scheme is not None:
        format_of(config.kv_cache_scheme)


def _with_exact_ranges(config: QuantizationConfig) -> QuantizationConfig:
    """Observe inputs with `static_minmax` where no observer is named.

    Its range of an equalized value follows from the ranges of channels, so data is seen once.
    """
    changed: QuantizationConfig = config.model_copy(deep=True)
    for scheme in changed.config_groups.values():
        args = scheme.input_activations
        if args is not None and args.dynamic is not True and args.observer is None:
            scheme.input_activations = args.model_copy(update={"observer": _EXACT})
    return changed


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
