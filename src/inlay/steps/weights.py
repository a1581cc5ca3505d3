"""Weights of a model: plain, equalized, compensated, and folded."""

import weakref
from collections.abc import Mapping, MutableMapping

import torch
from torch import nn

from inlay.equalization.parameters import EqualizedParameters
from inlay.errors import StatisticsError
from inlay.nodes.kernels import integer_weight
from inlay.nodes.quantize import fold_weight
from inlay.observers import QParamsDict
from inlay.recipe import Plan, Slot
from inlay.recipe.experts import ExpertStack

__all__ = ["Weights"]


class Weights:
    """The weights of the quantized modules of a model, and a cache of the folded ones.

    Modules are referred to weakly: compiled code may outlive the model.

    :param equalized: the parameters that are scaled before they are quantized
    :ivar compensated: weights that are on their grid already, by module
    """

    def __init__(self, model: nn.Module, plan: Plan, equalized: EqualizedParameters) -> None:
        modules = plan.modules_of(model)
        self._modules = {
            slot.module: weakref.ref(modules[slot.module])
            for slot in plan.slots.values()
            if slot.module in plan.kinds
        }
        self._plan = plan
        self.equalized = equalized
        self._folded: dict[str, torch.Tensor] = {}
        self._integers: dict[str, torch.Tensor] = {}
        self.compensated: MutableMapping[str, torch.Tensor] = {}

    def current(self, slot: Slot) -> torch.Tensor:
        """Return the weight of a slot as it is to be quantized: compensated, if it is."""
        compensated = self.compensated.get(slot.module)
        return self.plain(slot) if compensated is None else compensated

    def take_compensated(self) -> dict[str, torch.Tensor]:
        """Hand over the compensated weights, and keep them no longer."""
        taken = dict(self.compensated)
        self.compensated.clear()
        return taken

    def of_layer(self, module: str, weight: torch.Tensor) -> torch.Tensor:
        """Return the tensor to write for a module with this weight; the module may have no slot."""
        compensated = self.compensated.get(module)
        return self.equalized.of(weight) if compensated is None else compensated

    def plain(self, slot: Slot) -> torch.Tensor:
        """Return the weight of a slot before any rounding: as the model has it, or equalized."""
        return self.equalized.of(self.of_module(slot.module))

    def of_module(self, name: str) -> torch.Tensor:
        """The weight of a module as the model has it."""
        module = self._modules[name]()
        if module is None:
            raise StatisticsError(f"the model is gone, and with it the weight of {name}")
        weight = module.weight
        assert isinstance(weight, torch.Tensor)
        return weight

    def folded(self, slot: Slot, qparams: QParamsDict) -> torch.Tensor:
        """The weight of a slot as the quantized model sees it, made when first asked for."""
        if slot.name not in self._folded:
            self._folded[slot.name] = fold_weight(self.current(slot), slot.args, qparams)
        return self._folded[slot.name]

    def integers(self, slot: Slot, qparams: QParamsDict) -> torch.Tensor:
        """The weight of a slot as it is stored, made when first asked for."""
        if slot.name not in self._integers:
            scale = qparams["scale"]
            assert scale is not None
            self._integers[slot.name] = integer_weight(self.current(slot), scale, slot.args)
        return self._integers[slot.name]

    def folded_stack(self, stack: ExpertStack, qparams: Mapping[str, QParamsDict]) -> torch.Tensor:
        """A parameter with the weights of many experts, each as the quantized model sees it."""
        if stack.name not in self._folded:
            folded = torch.empty_like(stack.parameter, requires_grad=False)
            for name, part in stack.parts_of(folded).items():
                slot = self._plan.slots[f"{name}.weight"]
                part.copy_(fold_weight(self.current(slot), slot.args, qparams[slot.name]))
            self._folded[stack.name] = folded
        return self._folded[stack.name]

    def folded_for_once(self, slot: Slot, qparams: QParamsDict) -> torch.Tensor:
        """The folded weight, without keeping it: all weights twice may not fit into memory."""
        known = self._folded.get(slot.name)
        return fold_weight(self.current(slot), slot.args, qparams) if known is None else known

    def forget_folded(self) -> None:
        """Drop the quantized weights that are kept."""
        self._folded.clear()
        self._integers.clear()

    def with_own_cache(self) -> "Weights":
        """The same weights, with a cache of folded ones that goes when this goes."""
        copied = object.__new__(Weights)
        copied._modules, copied._folded = self._modules, dict(self._folded)
        copied._integers = dict(self._integers)
        copied.equalized, copied._plan = self.equalized, self._plan
        copied.compensated = self.compensated
        return copied
