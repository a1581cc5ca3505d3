"""A recipe applied to a model: its slots, found by module and by weight."""

import copy
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.initialize import is_cached_attention_module
from compressed_tensors.utils.match import (
    is_match,
    is_narrow_match,
    match_named_modules,
    match_targets,
)
from torch import nn

from inlay.errors import ConfigurationError
from inlay.observers import FUSED_LAYER_NAMES
from inlay.ranges.args import key_of
from inlay.recipe.describe import left_in_words
from inlay.recipe.experts import ExpertLinear, ExpertStack, expert_stacks
from inlay.recipe.owners import Locate, Owners
from inlay.recipe.recipe import Recipe
from inlay.recipe.recognition import problem_with_product
from inlay.recipe.requirements import (
    require_fitting_shapes,
    require_matches,
    require_one_scheme,
    weight_of,
)
from inlay.recipe.served_experts import scheme_of_experts
from inlay.recipe.slot import BASE_NAMES, Slot, channels_of

__all__ = ["Plan"]

_KINDS = {"linear": nn.Linear, "embedding": nn.Embedding}


class Plan:
    """A recipe applied to a model: its slots by name, and the modules that own its weights."""

    def __init__(self, model: nn.Module, recipe: Recipe) -> None:
        self.recipe = recipe
        self.slots: dict[str, Slot] = {}
        self.kinds: dict[str, str] = {}
        self.modules: set[str] = set()  # names of all modules
        self._owners = Owners(model)
        for name, module in model.named_modules(remove_duplicate=False):
            self.modules.add(name)
            kind = next((k for k, cls in _KINDS.items() if isinstance(module, cls)), None)
            if kind is not None:
                self.kinds[name] = kind
        self.experts: dict[str, ExpertLinear] = {}  # by name
        self.stacks: dict[str, ExpertStack] = {}  # parameters whose experts are quantized
        self._stacked: dict[str, Slot] = {}  # what an op on a whole stack has for slots
        # The second: why experts stay as they are, by the module that has them.
        stacks, self.experts_left = expert_stacks(model)
        for stack in stacks:
            self.experts.update({name: ExpertLinear(w) for name, w in stack.members.items()})
        everything = self.modules_of(model)
        require_matches(everything, type(model).__name__, recipe)
        # The second: why other modules stay as they are, although the recipe targets them.
        self.modules_left: dict[str, str] = {}
        for name, parts in _quantized_parts(model, recipe, self.modules_left):
            self._add(name, parts)
        for text in left_in_words(self.modules_left):
            warnings.warn(text, stacklevel=3)
        for _, alike in groupby(stacks, lambda stack: stack.experts):
            self._add_experts(list(alike))
        require_fitting_shapes(everything, self.slots.values())
        require_one_scheme(self.slots, lambda name: self.owners(weight_of(everything[name])))
        if recipe.equalize is not None and not any(True for _ in self.channel_slots()):
            raise ConfigurationError(
                "the recipe equalizes the channels of inputs, but quantizes no Linear that reads "
                "some; leave equalize out, or choose a scheme such as W8A8_STATIC"
            )

    def _add(self, module: str, parts: Iterable[tuple[str, QuantizationArgs]]) -> None:
        for base_name, args in parts:
            slot = Slot(module, base_name, args)
            self.slots[slot.name] = slot

    def _add_experts(self, stacks: Sequence[ExpertStack]) -> None:
        """Give slots to the experts of a module, and to the parameters that hold them.

        :raises ConfigurationError: if no server would run them as the recipe asks
        """
        members = {name: self.experts[name] for stack in stacks for name in stack.members}
        scheme = scheme_of_experts(
            stacks[0].experts, members, _schemes_of(self.recipe), self.recipe.config.ignore or ()
        )
        if not isinstance(scheme, QuantizationScheme):
            self.experts_left[stacks[0].experts] = scheme
            return
        parts = [("weight", scheme.weights), ("input", scheme.input_activations)]
        given = [(base_name, args) for base_name, args in parts if args is not None]
        for name in members:
            self.kinds[name] = "linear"
            self._owners.add(name, self.experts[name].weight)
            self._add(name, given)
        for stack in stacks:
            self.stacks[stack.name] = stack
            self.kinds[stack.name] = "experts"
            self._owners.add(stack.name, stack.parameter)
            for base_name, args in given:
                self._stacked[f"{stack.name}.{base_name}"] = Slot(stack.name, base_name, args)

    def part(self, belongs: Callable[[str], bool]) -> "Plan":
        """Return the same plan with the slots of some modules alone.

        :param belongs: tells by name whether a module is one of them
        """
        part = copy.copy(self)
        part.slots = {name: slot for name, slot in self.slots.items() if belongs(slot.module)}
        part.stacks = {name: stack for name, stack in self.stacks.items() if belongs(stack.experts)}
        return part

    def renew_experts(self) -> None:
        """Take the weights of experts from their parameters again, which have other data now."""
        for stack in self.stacks.values():
            for name, weight in stack.parts_of(stack.parameter).items():
                self.experts[name].weight.data = weight

    def modules_of(self, model: nn.Module) -> dict[str, nn.Module]:
        """Return all modules by name, and each expert as a module of its own."""
        of_parent: dict[str, dict[str, nn.Module]] = {}
        for name, expert in self.experts.items():
            of_parent.setdefault(name.rsplit(".", 2)[0], {})[name] = expert
        found: dict[str, nn.Module] = {}
        for name, module in model.named_modules(remove_duplicate=False):
            found[name] = module
            found.update(of_parent.get(name, {}))
        return found

    def slot_named(self, name: str) -> Slot:
        """Return a slot, or that of all experts in a parameter."""
        return self._stacked[name] if name in self._stacked else self.slots[name]

    def of_experts(self, slot: Slot) -> list[tuple[Slot, ...]]:
        """Return the slots of each expert that a slot of all experts in a parameter stands for."""
        stack = self.stacks[slot.module]
        names = iter(stack.members)
        return [
            tuple(slot.moved_to(next(names)) for _ in stack.projections) for _ in stack.parameter
        ]

    def with_stacks(self, qparams: Mapping[str, Any]) -> dict[str, Any]:
        """Return qparams that also have those of all experts, for stacks of which all have some.

        Inputs are quantized with the qparams of all experts along a first dimension.
        """
        complete: dict[str, Any] = {}
        for slot in self._stacked.values():
            members = self.of_experts(slot)
            if slot.is_observed and all(own.name in qparams for each in members for own in each):
                # A folded weight follows from the parameter.
                complete[slot.name] = {} if slot.is_weight else self.stacked(slot, qparams)
        return {**qparams, **complete}

    def stacked(self, slot: Slot, qparams: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Return the qparams of all experts that a slot stands for, along a first dimension."""
        of_each = [slot.moved_to(own.module).used_of(qparams) for own, *_ in self.of_experts(slot)]
        return {
            key: torch.stack([each[key] for each in of_each])
            for key, value in of_each[0].items()
            if isinstance(value, torch.Tensor)
        }

    def owner(
        self, weight: torch.Tensor | None, kind: str | None = None, path: str | None = None
    ) -> str | None:
        """Find the module of a kind that has a weight.

        :param path: tells which module is meant if several share the weight: the name of the one
            that was called. If it is none of them, a quantized one stands for all.
        """
        names = self.owners(weight, kind)
        if len(names) > 1 and path is not None:
            called = self._owners.called(names, path)
            if called is not None:
                return called
        return min(names, key=lambda name: not self.of_module(name), default=None)

    def owners(self, weight: torch.Tensor | None, kind: str | None = None) -> list[str]:
        """Find all modules of a kind that share a weight."""
        names = [] if weight is None else self._owners.having(weight)
        return [name for name in names if kind is None or self.kinds.get(name) == kind]

    @property
    def shares_weights(self) -> bool:
        """Whether several modules have one parameter, such as an embedding and a tied head."""
        return self._owners.is_any_shared

    def locator(self, reads: Iterable[tuple[str, torch.Tensor]], root: str | None = None) -> Locate:
        """Return a function from paths in a trace to names in the model.

        :param reads: parameters that were read, and the paths of the modules that read them
        :param root: the name of the module that was traced, if it is known
        """
        return self._owners.locator(reads) if root is None else lambda path: f"{root}.{path}"

    def of_module(self, module: str) -> dict[str, Slot]:
        """Return the slots of a module by base name."""
        known = self._stacked if module in self.stacks else self.slots
        slots = (known.get(f"{module}.{base_name}") for base_name in BASE_NAMES)
        return {slot.base_name: slot for slot in slots if slot is not None}

    def signature(self, module: str | None) -> tuple[tuple[str, str], ...]:
        """Tell how a module is quantized. Modules of equal signature can share a compiled graph."""
        return tuple((slot.base_name, key_of(slot.args)) for slot in self.slots_at(module))

    def slots_at(self, module: str | None) -> list[Slot]:
        """Return the slots of a module with a weight, and of the module around it.

        Attention has slots but no weight to be found by, only modules inside that have one.
        """
        if module is None:
            return []
        around = self.of_module(module.rpartition(".")[0])
        return [*self.of_module(module).values(), *around.values()]

    def observes_in(self, modules: Iterable[str | None]) -> bool:
        """Tell whether data is observed in any of these modules, or in one around it."""
        slots = [slot for module in modules for slot in self.slots_at(module)]
        return any(
            bool(self.watches(slot.module)) or self.can_watch_channels(slot.module)
            if slot.is_weight
            else self._is_observed(slot)
            for slot in slots
        )

    def _is_observed(self, slot: Slot) -> bool:
        is_watched = slot.base_name == "input" and self.recipe.equalize is not None
        return slot.is_observed or is_watched

    def can_watch_channels(self, module: str) -> bool:
        """Whether the channels of a module's input can be equalized: a quantized Linear's.

        Experts that share the range of their layer are not scaled each by itself.
        """
        is_expert = module in self.experts or module in self.stacks
        if self.recipe.equalize is None or (is_expert and self.experts_share_ranges):
            return False
        return self.kinds.get(module) in ("linear", "experts") and bool(self.of_module(module))

    @property
    def experts_share_ranges(self) -> bool:
        """Whether some experts, or all, are given the range of their layer."""
        return self.recipe.experts in ("fill", "layer")

    def weight_slots(self) -> Iterable[Slot]:
        return (slot for slot in self.slots.values() if slot.is_weight)

    def watches(self, module: str) -> dict[str, Slot]:
        """Return what is gathered at the input of a module for its weight, by key.

        That is the importance of its channels, if the weight's observer asks for it, and the
        Hessian, if rounding errors are compensated. Channels depend on the graph: those that it
        lets equalize are found there.
        """
        weight = self.of_module(module).get("weight")
        if weight is None:
            return {}
        found = [weight.importance, weight.hessian if self.compensates(module) else None]
        return {slot.key: slot for slot in found if slot is not None}

    def compensates(self, module: str) -> bool:
        """Whether the rounding errors of a module's weight are compensated."""
        return self.recipe.gptq is not None and self.kinds.get(module) in ("linear", "experts")

    def watching_slots(self) -> Iterable[Slot]:
        """Return what is gathered at inputs for weights."""
        for slot in self.weight_slots():
            yield from self.watches(slot.module).values()

    def channel_slots(self) -> Iterable[Slot]:
        """Return the slots that watch the channels of inputs, if the recipe equalizes them."""
        modules = dict.fromkeys(slot.module for slot in self.slots.values())
        watched = (name for name in modules if self.can_watch_channels(name))
        return (channels_of(self.of_module(name)) for name in watched)

    @property
    def needs_second_run(self) -> bool:
        """Whether inputs have to be observed again, once it is known how they are equalized."""
        return self.recipe.equalize is not None and any(s.sees_scaled for s in self.slots.values())

    def fused_groups(self) -> Iterable[tuple[str, list[str]]]:
        """Yield prefix and names of the layers that are served as one, as far as they exist."""
        parents = {slot.module.rpartition(".")[0] for slot in self.weight_slots()}
        for parent in sorted(parents):
            prefix = f"{parent}." if parent else ""
            for group in FUSED_LAYER_NAMES:
                members = [name for name in group if f"{prefix}{name}" in self.kinds]
                if len(members) > 1:
                    yield prefix, members

    def activation_slots(self) -> Iterable[Slot]:
        """Return the slots that must see data before the recipe can be finalized."""
        return (slot for slot in self.slots.values() if not slot.is_weight and slot.is_observed)

    @property
    def needs_data(self) -> bool:
        """Whether any slot must see data: activations, or inputs that are watched."""
        return any(
            True
            for slots in (self.activation_slots(), self.watching_slots(), self.channel_slots())
            for _ in slots
        )


def _quantized_parts(
    model: nn.Module, recipe: Recipe, left: dict[str, str]
) -> Iterable[tuple[str, list[tuple[str, QuantizationArgs]]]]:
    """Yield modules and their quantized parts, chosen as compressed-tensors chooses them.

    :param left: takes the modules that are targeted and cannot be quantized, with the reason
    """
    config = recipe.config
    attention: dict[str, list[tuple[str, QuantizationArgs]]] = {}
    if config.kv_cache_scheme is not None:
        for name, module in model.named_modules():
            if is_cached_attention_module(module):
                attention[name] = [(part, config.kv_cache_scheme) for part in ("k", "v")]
        if not attention:
            raise ConfigurationError(
                "the recipe quantizes the key-value cache, but the model has no attention module "
                "that takes one; leave kv_cache out"
            )

    schemes = _schemes_of(recipe)
    for name, module in match_named_modules(model, schemes, config.ignore):
        scheme: QuantizationScheme = schemes[match_targets(name, module, schemes)[0]]
        if is_cached_attention_module(module) and is_narrow_match(model, scheme.targets, name):
            if scheme.input_activations is not None:
                attention[name] = [(part, scheme.input_activations) for part in ("q", "k", "v")]
        elif isinstance(module, tuple(_KINDS.values())):
            assert isinstance(module, nn.Module)
            problem = problem_with_product(module)
            if problem is not None:
                left[name] = problem
                continue
            parts = [
                ("weight", scheme.weights),
                ("input", scheme.input_activations),
                ("output", scheme.output_activations),
            ]
            if isinstance(module, nn.Embedding):  # embedding inputs are indices
                parts = [part for part in parts if part[0] != "input"]
            yield name, [(part, args) for part, args in parts if args is not None]
        elif any(
            is_match(name, module, target) and not target.startswith("re:")
            for target in scheme.targets
        ):
            raise ConfigurationError(f"{name} is a {type(module).__name__}; {_QUANTIZABLE}")
        elif _holds_matrix(module):
            left[name] = f"it is a {type(module).__name__}, and {_QUANTIZABLE}"
    yield from attention.items()


_QUANTIZABLE = "only Linear, Embedding and attention modules can be quantized"


def _holds_matrix(module: nn.Module) -> bool:
    """Whether a module has a weight that it may multiply by."""
    weight = module._parameters.get("weight")
    return weight is not None and weight.dim() in (2, 3)


def _schemes_of(recipe: Recipe) -> dict[str, QuantizationScheme]:
    """The schemes of a recipe by target."""
    groups = recipe.config.config_groups.values()
    return {target: scheme for scheme in groups for target in scheme.targets}
