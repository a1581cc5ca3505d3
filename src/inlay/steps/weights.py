"""Weights of a model: plain, equalized, compensated, and folded."""

import weakref
from collections.abc import Hashable, Mapping, MutableMapping
from dataclasses import dataclass

import torch
from torch import nn

from inlay.equalization.parameters import EqualizedParameters
from inlay.errors import StatisticsError
from inlay.model import Weight
from inlay.nodes.kernels import integer_weight
from inlay.nodes.quantize import fold_weight
from inlay.observers import QParamsDict
from inlay.recipe import Plan

__all__ = ["Compensation", "Weights"]


@dataclass(frozen=True, kw_only=True)
class Compensation:
    """How much compensation gained for a weight.

    :param signal: squared outputs of the layer, summed over tokens
    :param before: squared errors of the outputs with the weight rounded to nearest
    :param after: the same with the weight compensated
    :param damping: the damping that its Hessian needed, relative to the mean of its diagonal
    :param failed: whether the Hessian could not be factorized, so the weight is rounded to nearest
    """

    signal: float
    before: float
    after: float
    damping: float
    failed: bool


class Weights:
    """The weights of the quantized layers of a model, and a cache of the folded ones.

    Modules are referred to weakly: compiled code may outlive the model.

    :param equalized: the parameters that are scaled before they are quantized
    :ivar compensated: weights that are on their grid already, by module
    :ivar compensations: what that gained, by module
    """

    def __init__(self, model: nn.Module, plan: Plan, equalized: EqualizedParameters) -> None:
        self._plan = plan
        holders = {view.parameter.rpartition(".")[0] for view in plan.weights.values()}
        self._holders = {name: weakref.ref(model.get_submodule(name)) for name in holders}
        self.equalized = equalized
        self._folded: dict[str, torch.Tensor] = {}  # by parameter
        self._integers: dict[str, torch.Tensor] = {}  # by module
        self.compensated: MutableMapping[str, torch.Tensor] = {}
        self.compensations: dict[str, Compensation] = {}

    def current(self, view: Weight) -> torch.Tensor:
        """Return a weight as it is to be quantized: compensated, if it is."""
        compensated = self.compensated.get(view.module)
        return self.plain(view) if compensated is None else compensated

    def take_compensated(self) -> dict[str, torch.Tensor]:
        """Hand over the compensated weights, and keep them no longer."""
        taken = dict(self.compensated)
        self.compensated.clear()
        return taken

    def plain(self, view: Weight) -> torch.Tensor:
        """Return a weight before any rounding: as the model has it, or equalized."""
        return view.read(self.equalized.of(self._parameter(view)))

    def original(self, view: Weight) -> torch.Tensor:
        """Return a weight as the model has it."""
        return view.read(self._parameter(view))

    def of_module(self, name: str) -> torch.Tensor:
        """Return the weight of a module as the model has it."""
        return self.original(self._plan.weights[name])

    def place(self, view: Weight) -> Hashable:
        """Return a key that is the same for the weights of modules that share one."""
        return id(self._parameter(view)), view.index, view.rows

    def _parameter(self, view: Weight) -> torch.Tensor:
        holder, _, name = view.parameter.rpartition(".")
        module = self._holders[holder]()
        if module is None:
            raise StatisticsError(f"the model is gone, and with it the weight of {view.module}")
        parameter = getattr(module, name)
        assert isinstance(parameter, torch.Tensor)
        return parameter

    def folded(self, op: str, qparams: Mapping[str, QParamsDict]) -> torch.Tensor:
        """Return the quantized weights that an op reads, in the layout of their parameter.

        They are folded when first asked for, and kept.

        :param op: the name of a module or a stack
        """
        views = self._plan.weights_of(op)
        parameter = views[0].parameter
        if parameter not in self._folded:
            if views[0].is_whole:
                folded = self._fold(views[0], qparams)
            else:
                folded = torch.empty_like(self._parameter(views[0]), requires_grad=False)
                for view in views:
                    view.write(self._fold(view, qparams), folded)
            self._folded[parameter] = folded
        return self._folded[parameter]

    def quantized(self, view: Weight, qparams: Mapping[str, QParamsDict]) -> torch.Tensor:
        """Return a quantized weight, without keeping it: all of them may not fit into memory."""
        known = self._folded.get(view.parameter)
        return self._fold(view, qparams) if known is None else view.read(known)

    def integers(self, view: Weight, qparams: Mapping[str, QParamsDict]) -> torch.Tensor:
        """Return a quantized weight as it is stored, made when first asked for."""
        if view.module not in self._integers:
            slot = self._plan.slots[f"{view.module}.weight"]
            scale = qparams[slot.name]["scale"]
            assert scale is not None
            self._integers[view.module] = integer_weight(self.current(view), scale, slot.args)
        return self._integers[view.module]

    def _fold(self, view: Weight, qparams: Mapping[str, QParamsDict]) -> torch.Tensor:
        slot = self._plan.slots[f"{view.module}.weight"]
        return fold_weight(self.current(view), slot.args, qparams[slot.name])

    def forget_folded(self) -> None:
        """Drop the quantized weights that are kept."""
        self._folded.clear()
        self._integers.clear()

    def with_own_cache(self) -> "Weights":
        """The same weights, with a cache of folded ones that goes when this goes."""
        copied = object.__new__(Weights)
        copied._holders, copied._folded = self._holders, dict(self._folded)
        copied._integers = dict(self._integers)
        copied.equalized, copied._plan = self.equalized, self._plan
        copied.compensated, copied.compensations = self.compensated, self.compensations
        return copied
