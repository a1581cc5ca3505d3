"""From the observers that llm-compressor attached to a model to a recipe of Inlay."""

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
)
from llmcompressor.observers import Observer as PeerObserver
from torch import nn

from inlay.compensation.settings import GPTQ
from inlay.llmcompressor.observers import counterpart, input_hook_of
from inlay.ranges.args import key_of
from inlay.recipe import BASE_NAMES, Gathers, Recipe

__all__ = ["Attached", "attached_observers", "recipe_of", "targets_of"]

_PARTS = {"weight": "weights", "input": "input_activations", "output": "output_activations"}


@dataclass(frozen=True)
class Attached:
    """An observer of llm-compressor, and the part of a module that it stands at."""

    module: str
    base_name: str
    observer: PeerObserver

    @property
    def gathers_from(self) -> str | None:
        """The slot whose data it needs; None for a weight that is quantized without any."""
        if self.base_name != "weight":
            return f"{self.module}.{self.base_name}"
        if input_hook_of(self.observer) is None:
            return None
        return f"{self.module}.input:{Gathers.IMPORTANCE.value}"


def attached_observers(model: nn.Module) -> list[Attached]:
    """All observers that stand at modules of a model."""
    return [
        Attached(name, base_name, getattr(module, f"{base_name}_observer"))
        for name, module in model.named_modules()
        for base_name in BASE_NAMES
        if isinstance(getattr(module, f"{base_name}_observer", None), PeerObserver)
    ]


def recipe_of(model: nn.Module, attached: Iterable[Attached], gptq: GPTQ | None = None) -> Recipe:
    """Return the recipe by which Inlay gathers what these observers of the model would.

    Weights are left out where they need no data: llm-compressor observes them at the end.

    :param gptq: how weights are compensated, which needs data for all of them
    """
    parts: dict[str, dict[str, QuantizationArgs]] = {}
    for one in attached:
        if one.gathers_from is not None or gptq is not None:
            parts.setdefault(one.module, {})[one.base_name] = counterpart(one.observer)
    alike: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for name, args in parts.items():
        alike.setdefault(tuple((part, key_of(args[part])) for part in args), []).append(name)
    cache = [args["k"] for args in parts.values() if "k" in args and "q" not in args]
    everything = [name for name, _ in model.named_modules()]
    return Recipe(
        QuantizationConfig(
            config_groups={
                f"group_{number}": _scheme(parts[names[0]], targets_of(names, everything))
                for number, names in enumerate(alike.values())
                if not _caches_only(parts[names[0]])
            },
            # It holds for all attention modules, so there is only one.
            kv_cache_scheme=cache[0] if cache else None,
        ),
        gptq=gptq,
    )


def _caches_only(args: Collection[str]) -> bool:
    return "k" in args and "q" not in args


def _scheme(args: dict[str, QuantizationArgs], targets: list[str]) -> QuantizationScheme:
    if "q" in args:
        return QuantizationScheme(targets=targets, input_activations=args["q"])
    return QuantizationScheme(
        targets=targets, **{_PARTS[part]: of_part for part, of_part in args.items()}
    )


def targets_of(names: Collection[str], everything: Iterable[str]) -> list[str]:
    """Targets that match these modules and none of the others, as few as numbers in names allow.

    A large model has thousands of modules, and each target is matched with each of them.

    :param everything: the names of all modules
    """
    wanted = set(names)
    alike: dict[str, list[str]] = {}
    for name in everything:
        alike.setdefault(_pattern(name, any_number=True), []).append(name)
    targets: list[str] = []
    for pattern, matched in alike.items():
        if wanted.issuperset(matched):
            targets.append(pattern)
        else:
            # As patterns too: a name alone may also be that of a class.
            targets += [_pattern(name, any_number=False) for name in matched if name in wanted]
    return targets


def _pattern(name: str, *, any_number: bool) -> str:
    """Return a target that matches a name, or all names that differ in their numbers alone."""
    parts = (
        "[0-9]+" if any_number and part.isascii() and part.isdecimal() else re.escape(part)
        for part in name.split(".")
    )
    return f"re:^{'[.]'.join(parts)}$"
