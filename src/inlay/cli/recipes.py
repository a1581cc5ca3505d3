"""Turning the options of a command into a recipe.

What can be refused by its name alone is refused before the library is imported.
"""

import importlib.util
import re
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
import yaml

from inlay.cli.known import needs_data, observer_names, preset_names
from inlay.errors import ConfigurationError
from inlay.recipe_file import read_recipe

if TYPE_CHECKING:
    from compressed_tensors.quantization import QuantizationConfig
    from torch import nn

    from inlay.cli.arguments import RecipeOptions
    from inlay.compensation.settings import GPTQ
    from inlay.recipe import Experts, Recipe, Strength

__all__ = ["KV_CACHES", "ObserverChoice", "Wanted", "run_observer_file", "wanted_of"]

KV_CACHES: dict[str, dict[str, Any]] = {
    "fp8": {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True},
    "int8": {"num_bits": 8, "type": "int", "strategy": "tensor", "symmetric": True},
}
_PARTS = {
    "weights": "weights",
    "weight": "weights",
    "input": "input_activations",
    "inputs": "input_activations",
    "output": "output_activations",
    "outputs": "output_activations",
    "kv-cache": "kv_cache_scheme",
    "kv_cache": "kv_cache_scheme",
}


@dataclass(frozen=True, kw_only=True)
class ObserverChoice:
    """An observer for one part of a scheme: `input=histogram:method=entropy,norm=2`."""

    part: str
    name: str
    settings: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> "ObserverChoice":
        """Read a choice as it is typed."""
        choice, _, settings = text.partition(":")
        part, _, name = choice.partition("=")
        if part not in _PARTS or not name:
            raise ConfigurationError(
                f"{text!r} is not PART=NAME or PART=NAME:KEY=VALUE,…, where PART is weights, "
                "input, output or kv-cache"
            )
        return cls(part=part, name=name, settings=dict(map(_setting, _listed(settings))))


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """The wish of a user: a preset or a recipe in a file, and the options on top of it.

    :param ignore: names of modules; `none` quantizes even the head of a language model
    :param method: how a preset rounds weights of few bits, of `METHODS`
    """

    scheme: str | None = None
    file: Path | None = None
    observers: tuple[ObserverChoice, ...] = ()
    group_size: int | None = None
    ignore: tuple[str, ...] = ()
    kv_cache: str | None = None
    equalize: "Strength | None" = None
    experts: "Experts | None" = None
    gptq: bool = False
    keep_hessians: bool = False
    method: str = "plain"
    has_data: bool = False

    def require_known_names(self) -> None:
        """Refuse unknown presets, observers and entries of a file, as far as names tell."""
        if self.file is not None:
            read_recipe(self.file)
        presets, observers = preset_names(), observer_names()
        if presets and self.scheme is not None and self.scheme.upper() not in presets:
            raise ConfigurationError(
                f"there is no preset {self.scheme!r}; use one of {', '.join(presets)}"
            )
        for name in (choice.name for choice in self.observers):
            if observers and re.sub(r"[- ]", "_", name.lower()) not in observers:
                raise ConfigurationError(
                    f"there is no observer {name!r}. Registered: {', '.join(observers)}. Register "
                    "your own with @Observer.register(name) in a file and name it: --observer-file"
                )

    def require_data(self) -> None:
        """Refuse to calibrate without data what cannot do without, as far as options tell."""
        reasons = {
            str(self.scheme): self.scheme is not None and needs_data(self.scheme),
            "--kv-cache": self.kv_cache is not None,
            "--gptq": self.gptq,
        }
        for reason in (reason for reason, needs in reasons.items() if needs and not self.has_data):
            raise ConfigurationError(
                f"{reason} needs calibration data. Pass --data, or use what needs none, such as "
                "--scheme W8A8 or W4A16. --sample-text calibrates on a built-in text, for a try"
            )

    def require_recipe(self) -> None:
        """Refuse whatever makes no recipe, before a model is loaded for it."""
        from inlay.recipe import Recipe

        Recipe.from_config(self._config(), **self._options())

    def recipe_for(self, model: "nn.Module") -> "Recipe":
        """Make the recipe for a model."""
        from inlay.recipe import Recipe

        config = self._config()
        ignored = [name for name in self.ignore if name != "none"]
        config.ignore = list(dict.fromkeys([*(config.ignore or []), *ignored]))
        recipe = Recipe.from_config(config, **self._options())
        # A recipe in a file names itself the modules to ignore.
        keeps_head = self._start().keeps_head and "none" not in self.ignore
        recipe = replace(recipe, keeps_head=keeps_head).for_model(model)
        if self.scheme is not None and self.method == "best":
            recipe = recipe.with_best_method(has_data=self.has_data, model=model)
        named = {_PARTS[choice.part] for choice in self.observers}
        return replace(recipe, preset_observers=self._start().preset_observers - named)

    def _options(self) -> dict[str, Any]:
        """Return what a recipe has besides its config: as started from, with the changes wanted."""
        start = self._start()
        return {
            "equalize": start.equalize if self.equalize is None else self.equalize,
            "experts": start.experts if self.experts is None else self.experts,
            "gptq": self._gptq(start),
        }

    def _gptq(self, start: "Recipe") -> "GPTQ | None":
        from inlay.compensation.settings import GPTQ

        chosen = start.gptq or (GPTQ() if self.gptq else None)
        if not self.keep_hessians:
            return chosen
        if chosen is None:
            raise ConfigurationError("--keep-hessians keeps what GPTQ gathers; add --gptq")
        return replace(chosen, keep_hessians=True)

    def _config(self) -> "QuantizationConfig":
        """Return the config without what the model decides."""
        from compressed_tensors.quantization import QuantizationArgs

        config = self._start().config.model_copy(deep=True)
        if self.kv_cache is not None:
            config.kv_cache_scheme = QuantizationArgs(**KV_CACHES[self.kv_cache])
        if self.group_size is not None:
            _regroup(config, self.group_size, self.scheme or str(self.file))
        for choice in self.observers:
            _choose(config, choice, self.scheme or str(self.file))
        return config

    def _start(self) -> "Recipe":
        from inlay.recipe import Recipe

        if self.scheme is not None and self.file is None:
            return Recipe.from_preset(self.scheme)
        if self.file is not None and self.scheme is None:
            return Recipe.from_yaml(self.file)
        raise ConfigurationError("give either a scheme or a recipe")


def wanted_of(options: "RecipeOptions", **given: Any) -> Wanted:
    """Collect the options about quantization. With a model, they become a recipe.

    :param given: the fields of `Wanted` that not every command has options for
    """
    if (options.scheme is None) == (options.recipe is None):
        raise typer.BadParameter("give exactly one of them", param_hint="--scheme or --recipe")
    try:
        choices = [ObserverChoice.parse(text) for text in options.observer or ()]
    except ConfigurationError as error:
        raise typer.BadParameter(str(error), param_hint="--observer") from error
    wanted = Wanted(
        scheme=options.scheme,
        file=options.recipe,
        observers=tuple(choices),
        group_size=options.group_size,
        ignore=tuple(options.ignore or ()),
        kv_cache=None if options.kv_cache is None else options.kv_cache.value,
        equalize=_strength(options.equalize),
        experts=None if options.experts is None else options.experts.value,
        gptq=options.gptq,
        **given,
    )
    if options.observer_file is not None:
        run_observer_file(options.observer_file)
    wanted.require_known_names()
    return wanted


def _strength(text: str | None) -> "Strength | None":
    if text is None or text == "auto":
        return text  # type: ignore[return-value]
    try:
        strength = float(text)
    except ValueError:
        strength = -1.0
    if not 0 <= strength <= 1:
        raise typer.BadParameter(
            f"{text!r} is no strength; give a number from 0 to 1, or auto", param_hint="--equalize"
        )
    return strength


def run_observer_file(path: Path) -> list[str]:
    """Execute a Python file and return the names of the observers that it registers."""
    from inlay.observers import Observer

    before = set(Observer.registered_names())
    name = f"inlay_observer_file_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigurationError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # tracing and copying look classes up by their module's name
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ConfigurationError(f"{path} fails with {type(error).__name__}: {error}") from error
    added = [name for name in Observer.registered_names() if name not in before]
    if not added:
        raise ConfigurationError(
            f'{path} registers no observer; decorate its class with @Observer.register("name")'
        )
    return added


def _regroup(config: "QuantizationConfig", size: int, source: str) -> None:
    """Set the size of groups of weights, in every group of layers that has integers in groups."""
    from inlay.recipe.presets import checked

    found = False
    for scheme in config.config_groups.values():
        args = scheme.weights
        if args is None or args.strategy != "group" or args.type != "int":
            continue
        fields = {name: getattr(args, name) for name in type(args).model_fields}
        scheme.weights = checked(type(args), **{**fields, "group_size": size})
        found = True
    if not found:
        raise ConfigurationError(
            f"{source} has no integer weights in groups, so --group-size does not apply; leave it "
            "out, or use a scheme such as W4A16"
        )


def _choose(config: "QuantizationConfig", choice: ObserverChoice, source: str) -> None:
    """Set the observer of one part, in every group that observes that part."""
    field_name = _PARTS[choice.part]
    is_cache = field_name == "kv_cache_scheme"
    owners = [config] if is_cache else list(config.config_groups.values())
    quantizing = [owner for owner in owners if getattr(owner, field_name) is not None]
    if not quantizing:
        hint = "add --kv-cache" if is_cache else "choose another scheme, or a recipe that does"
        raise ConfigurationError(f"{source} does not quantize {choice.part}; {hint}")
    observing = [owner for owner in quantizing if getattr(owner, field_name).dynamic is not True]
    if not observing:
        raise ConfigurationError(
            f"{source} quantizes {choice.part} dynamically, which needs no observer; choose a "
            "static scheme such as W8A8_STATIC or FP8"
        )
    for owner in observing:
        args = getattr(owner, field_name)
        change = {"observer": choice.name, "observer_kwargs": dict(choice.settings)}
        setattr(owner, field_name, args.model_copy(update=change))


def _listed(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


def _setting(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise ConfigurationError(f"the setting {text!r} of an observer is not KEY=VALUE")
    try:
        return key, yaml.safe_load(value)
    except yaml.YAMLError:
        return key, value
