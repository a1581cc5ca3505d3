"""What a recipe and a model have to have in common, checked before hours of calibration."""

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches

import torch
from compressed_tensors.quantization import QuantizationStrategy, QuantizationType
from compressed_tensors.utils.match import is_match
from torch import nn

from inlay.errors import ConfigurationError, ObservationError
from inlay.formats.storage import columns_problem
from inlay.model import Weight
from inlay.observers import flatten_for_calibration
from inlay.ranges.args import key_of
from inlay.recipe.recipe import Recipe
from inlay.recipe.slot import Slot

__all__ = ["require_fitting_shapes", "require_matches", "require_one_scheme", "weight_of"]

_SHOWN = 8  # names in an error
# Sizes of groups to suggest: powers of two, between these.
_LARGEST_GROUP, _SMALLEST_GROUP = 128, 16


def require_fitting_shapes(weights: Mapping[str, Weight], slots: Iterable[Slot]) -> None:
    """Refuse values that cannot be divided as the recipe asks, before hours of calibration."""
    problems: dict[str, str] = {}  # the first of each module
    slots = list(slots)
    for slot in slots:
        found = _misfit(slot, weights.get(slot.module))
        if found is not None:
            problems.setdefault(slot.module, found)
    if problems:
        alike: dict[str, list[str]] = {}
        for name, problem in problems.items():
            alike.setdefault(problem, []).append(name)
        raise ConfigurationError(
            "the recipe does not fit these layers: "
            + "; ".join(f"{_shown(names)}: {problem}" for problem, names in alike.items())
            + f". {_remedy(weights, slots)}"
        )


def _shown(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _remedy(weights: Mapping[str, Weight], slots: Iterable[Slot]) -> str:
    """Suggest a size of groups that divides the columns of all integer weights in groups."""
    columns = [
        weights[slot.module].shape[-1]
        for slot in slots
        if slot.is_weight
        and slot.args.strategy == QuantizationStrategy.GROUP
        and slot.args.type == QuantizationType.INT
    ]
    size = math.gcd(*columns, _LARGEST_GROUP)
    if not columns or size < _SMALLEST_GROUP:
        return "Ignore these layers"
    return (
        f"Groups of {size} divide the columns of all layers: pass --group-size {size}, in Python "
        f'weights={{"group_size": {size}}}, or ignore these layers'
    )


def _misfit(slot: Slot, weight: Weight | None) -> str | None:
    """Describe why the weight, input or output of a module cannot be divided; None if it can."""
    if weight is None or slot.base_name not in ("weight", "input", "output"):
        return None
    if slot.is_weight:
        try:
            flatten_for_calibration(torch.empty(weight.shape, device="meta"), "weight", slot.args)
        except ObservationError as error:
            return str(error).removeprefix("weight: ")
    problem = columns_problem(weight.shape[0 if slot.base_name == "output" else -1], slot.args)
    return problem if slot.is_weight or problem is None else f"{slot.base_name}: {problem}"


def weight_of(module: nn.Module) -> torch.Tensor:
    """Return the weight of a Linear or an Embedding."""
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    return weight


def require_one_scheme(slots: Mapping[str, Slot], sharing: Callable[[str], Sequence[str]]) -> None:
    """Refuse two schemes for one weight: it is quantized once.

    :param sharing: names the modules that have the weight of a module
    """
    of_module = {slot.module: slot for slot in slots.values() if slot.is_weight}
    for name, slot in of_module.items():
        for other in sharing(name):
            if other in of_module and key_of(of_module[other].args) != key_of(slot.args):
                raise ConfigurationError(
                    f"{name} and {other} share one weight, and the recipe gives it two schemes. "
                    "Give both modules the same scheme, or ignore one of them"
                )


def require_matches(everything: Mapping[str, nn.Module], model: str, recipe: Recipe) -> None:
    modules = list(everything.items())
    targets = [t for scheme in recipe.config.config_groups.values() for t in scheme.targets]
    ignored = recipe.config.ignore or []
    for what, patterns in (("target", targets), ("ignore", ignored)):
        missing = [
            pattern
            for pattern in patterns
            if not any(is_match(name, module, pattern) for name, module in modules)
        ]
        if what == "ignore":
            # Recipes are shared between models, so a pattern may be meant for another one.
            shared = [pattern for pattern in missing if pattern.startswith("re:")]
            if shared:
                warnings.warn(
                    f"ignore {', '.join(shared)} matches no module of {model}",
                    stacklevel=4,
                )
            missing = [pattern for pattern in missing if pattern not in shared]
        if missing:
            known = {name for pair in modules for name in (pair[0], type(pair[1]).__name__)}
            close = get_close_matches(missing[0], known, n=1)
            hint = f"Did you mean {close[0]}? " if close else ""
            raise ConfigurationError(
                f"{what} {', '.join(missing)} matches no module of {model}. "
                f"{hint}The model has {_overview(modules)}"
            )


def _overview(modules: list[tuple[str, nn.Module]]) -> str:
    """List class names with an example each, to show what a target could have meant."""
    classes: dict[str, list[str]] = {}
    for name, module in modules:
        if name:
            classes.setdefault(type(module).__name__, []).append(name)
    return "; ".join(
        f"{cls} ({names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''})"
        for cls, names in sorted(classes.items())
    )
