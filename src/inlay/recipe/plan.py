"""A recipe applied to a model: its slots, found by module and by weight."""

import copy
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationScheme
from torch import nn

from inlay.errors import ConfigurationError
from inlay.model import PRODUCTS, Stack, StackedLinear, Weight, find_stacks
from inlay.observers import FUSED_LAYER_NAMES
from inlay.ranges.args import key_of
from inlay.recipe.describe import left_in_words
from inlay.recipe.owners import Locate, Owners
from inlay.recipe.recipe import Recipe
from inlay.recipe.requirements import (
    require_fitting_shapes,
    require_matches,
    require_one_scheme,
    weight_of,
)
from inlay.recipe.served_stacks import scheme_of_stacks
from inlay.recipe.slot import BASE_NAMES, Slot, channels_of
from inlay.recipe.targets import Ports, own_layout, quantized_ports, refuse_unserved, schemes_of

__all__ = ["Plan"]


class Plan:
    """A recipe applied to a model: its slots by name, and the weights that they belong to.

    :ivar weights: views of the weights of quantized layers, by module
    :ivar stacks: parameters whose weights are quantized and that an op reads as a whole, by name
    :ivar kinds: how ops read a weight, of `KINDS`, by module or stack
    :ivar schemes: how modules are quantized; modules that quantize only their cache have none
    :ivar places: the order of all modules, and of all weights in stacks
    """

    def __init__(self, model: nn.Module, recipe: Recipe) -> None:
        self.recipe = recipe = recipe.for_model(model)
        self.slots: dict[str, Slot] = {}
        self.weights: dict[str, Weight] = {}
        self.stacks: dict[str, Stack] = {}
        self.kinds: dict[str, str] = {}
        self.schemes: dict[str, QuantizationScheme] = {}
        self._of_stacks: dict[str, Slot] = {}  # the slots of ops that read a whole stack
        self._owners = Owners(model)
        for name, module in model.named_modules(remove_duplicate=False):
            layout = own_layout(name, module)
            if layout is not None:
                self.kinds[name] = layout.kind
        # Modules that keep their stacks as they are, with the reasons.
        stacks, self.stacks_left = find_stacks(model)
        everything = _with_stacks(model, stacks)
        self.places = {name: place for place, name in enumerate(everything)}
        require_matches(everything, type(model).__name__, recipe)
        # Other modules that stay as they are although the recipe targets them, with the reasons.
        self.modules_left: dict[str, str] = {}
        for name, ports, scheme in quantized_ports(model, recipe, self.modules_left):
            self._add(name, ports, scheme)
            layout = own_layout(name, everything[name])
            views = () if layout is None else layout.weights(name, everything[name])
            self.weights.update({view.module: view for view in views})
        for text in left_in_words(self.modules_left):
            warnings.warn(text, stacklevel=3)
        for holder, own in groupby(stacks, lambda stack: stack.holder):
            self._add_stacks(holder, list(own), everything)
        if not self.slots:
            refuse_unserved(model)
        for name in self.stacks:
            self._owners.add(name, model.get_parameter(name))
        require_fitting_shapes(self.weights, self.slots.values())
        require_one_scheme(self.slots, lambda name: self.owners(weight_of(everything[name])))
        if recipe.equalize is not None and not any(True for _ in self.channel_slots()):
            raise ConfigurationError(
                "the recipe equalizes the channels of inputs, but quantizes no Linear that reads "
                "some; leave equalize out, or choose a scheme such as W8A8_STATIC"
            )

    def _add(self, module: str, ports: Ports, scheme: QuantizationScheme | None) -> None:
        if scheme is not None:
            self.schemes[module] = scheme
        for base_name, args in ports:
            slot = Slot(module, base_name, args)
            self.slots[slot.name] = slot

    def _add_stacks(
        self, holder: str, stacks: Sequence[Stack], everything: Mapping[str, nn.Module]
    ) -> None:
        """Give slots to the weights in the stacks of a module, and to the stacks.

        :raises ConfigurationError: if no server would run them as the recipe asks
        """
        weights = {weight.module: weight for stack in stacks for weight in stack.weights}
        scheme = scheme_of_stacks(
            holder,
            {name: everything[name] for name in weights},
            schemes_of(self.recipe),
            self.recipe.config.ignore or (),
        )
        if not isinstance(scheme, QuantizationScheme):
            self.stacks_left[holder] = scheme
            return
        both = (("weight", scheme.weights), ("input", scheme.input_activations))
        ports = [(base_name, args) for base_name, args in both if args is not None]
        self.weights.update(weights)
        for name in weights:
            self.kinds[name] = "linear"
            self._add(name, ports, scheme)
        for stack in stacks:
            self.stacks[stack.name] = stack
            self.kinds[stack.name] = "grouped"
            for base_name, args in ports:
                slot = Slot(stack.name, base_name, args)
                self._of_stacks[slot.name] = slot

    def part(self, belongs: Callable[[str], bool]) -> "Plan":
        """Return the same plan with the slots of some modules alone.

        :param belongs: tells by name whether a module is one of them
        """
        part = copy.copy(self)
        part.slots = {name: slot for name, slot in self.slots.items() if belongs(slot.module)}
        part.stacks = {name: stack for name, stack in self.stacks.items() if belongs(stack.holder)}
        return part

    def weights_of(self, name: str) -> tuple[Weight, ...]:
        """Return the weights that an op reads: the weight of a module, or all of a stack."""
        return self.stacks[name].weights if name in self.stacks else (self.weights[name],)

    def slot_named(self, name: str) -> Slot:
        """Return the slot of a module or of a stack."""
        return self._of_stacks[name] if name in self._of_stacks else self.slots[name]

    def members(self, slot: Slot) -> list[tuple[Slot, ...]]:
        """Return the slots that a slot of an op stands for.

        :return: for each matrix in a stack the slots of its weights, which see the same rows; for
            any other slot the slot itself
        """
        if slot.module not in self.stacks:
            return [(slot,)]
        by_index = self.stacks[slot.module].by_index
        return [tuple(slot.moved_to(weight.module) for weight in own) for own in by_index]

    def qparams_of_ops(self, qparams: Mapping[str, Any]) -> dict[str, Any]:
        """Return qparams that also have those of stacks whose weights all have some."""
        of_stacks = {
            slot.name: self.used_by_op(slot, qparams)
            for slot in self._of_stacks.values()
            if slot.is_observed
            and all(own.name in qparams for each in self.members(slot) for own in each)
        }
        return {**qparams, **of_stacks}

    def used_by_op(self, slot: Slot, qparams: Mapping[str, Any]) -> dict[str, Any]:
        """Return the qparams that an op uses; those of a stack have a first dimension of indices.

        Weights are folded, so an op needs none of theirs.
        """
        if slot.module not in self.stacks:
            return slot.used_of(qparams)
        if slot.is_weight:
            return {}
        of_each = [own.used_of(qparams) for own, *_ in self.members(slot)]
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
        known = self._of_stacks if module in self.stacks else self.slots
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

        The weights of a stack that share one range cannot have scales of their own.
        """
        if self.recipe.equalize is None or (self.shared_range and self.is_routed(module)):
            return False
        return self.kinds.get(module) in PRODUCTS and bool(self.of_module(module))

    def is_routed(self, module: str) -> bool:
        """Whether a module or stack is given some rows of a value for each of its matrices."""
        weight = self.weights.get(module)
        return module in self.stacks or (weight is not None and weight.index is not None)

    @property
    def shared_range(self) -> str | None:
        """Say why the weights of a stack share the range of an input; None if each has its own."""
        wanted = self.recipe.experts
        if wanted not in ("fill", "layer"):
            return None
        return f'experts="{wanted}" gives experts the range of their layer'

    def weight_slots(self) -> Iterable[Slot]:
        return (slot for slot in self.slots.values() if slot.is_weight)

    def watches(self, module: str) -> dict[str, Slot]:
        """Return what is gathered at the input of a module for its weight, by key.

        That is the importance of its channels, if the weight's observer asks for it, and the
        Hessian, if rounding errors are compensated, with a part of it to choose the damping by.
        Channels depend on the graph: those that it lets equalize are found there.
        """
        weight = self.of_module(module).get("weight")
        if weight is None:
            return {}
        found = [weight.importance]
        gptq = self.recipe.gptq
        if gptq is not None and self.compensates(module):
            found += [weight.hessian, weight.held_out_hessian if gptq.chooses_damping else None]
        return {slot.key: slot for slot in found if slot is not None}

    def compensates(self, module: str) -> bool:
        """Whether the rounding errors of a module's weight are compensated."""
        return self.recipe.gptq is not None and self.kinds.get(module) in PRODUCTS

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


def _with_stacks(model: nn.Module, stacks: Iterable[Stack]) -> dict[str, nn.Module]:
    """Return all modules by name, and after the holder of a stack a Linear for each weight."""
    inside: dict[str, dict[str, nn.Module]] = {}
    for stack in stacks:
        linear = StackedLinear(stack.weights[0].shape)
        names = (weight.module for weight in stack.weights)
        inside.setdefault(stack.holder, {}).update(dict.fromkeys(names, linear))
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        found[name] = module
        found.update(inside.get(name, {}))
    return found
