"""The parameters of a model as equalization leaves them, in copies of its own."""

import weakref
from collections.abc import Callable, Mapping

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from inlay.equalization.group import Group, Producer
from inlay.errors import StatisticsError
from inlay.recipe import Plan

__all__ = ["EqualizedParameters"]

_Change = Callable[[torch.Tensor], torch.Tensor]


class EqualizedParameters:
    """The parameters of a model by identity, and copies of those that groups scale.

    Parameters are referred to weakly: compiled code may outlive the model.

    :param plan: knows the weights of experts; None if the model has none
    """

    def __init__(self, model: nn.Module, plan: Plan | None = None) -> None:
        self._names: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._by_name: dict[str, weakref.ref[torch.Tensor]] = {}
        for name, parameter in model.named_parameters():
            self._names[parameter] = name
            self._by_name[name] = weakref.ref(parameter)
        # Weights of experts by identity, as parts of the parameters that hold them.
        self._parts: WeakIdKeyDictionary = WeakIdKeyDictionary()
        for stack in plan.stacks.values() if plan is not None else ():
            for place, name in enumerate(stack.members):
                assert plan is not None
                self._parts[plan.experts[name].weight] = stack.name, place, len(stack.projections)
        # With the number of the expert whose part of the parameter is changed, if it is one's.
        self._changes: dict[str, list[tuple[int | None, _Change]]] = {}
        self._copies: dict[str, torch.Tensor] = {}

    def name_of(self, tensor: torch.Tensor | None) -> str | None:
        """Return the first name that a parameter has in the model; None for other tensors."""
        known: Mapping[torch.Tensor, str] = self._names
        return None if tensor is None else known.get(tensor)

    def scale(self, groups: Mapping[Group, torch.Tensor], weight_of: Mapping[str, str]) -> None:
        """Have groups scaled from now on.

        :param groups: the scale of each channel, by group
        :param weight_of: names of weights by names of readers
        """
        self._changes.clear()
        self._copies.clear()
        for group, scale in groups.items():
            for weight in dict.fromkeys(weight_of[reader] for reader in group.readers):
                self._add(weight, group, _times_columns(scale))
            for producer in group.producers:
                own = group.scale_of(producer, scale)
                self._add(producer.parameter, group, _divided(producer, own))

    def _add(self, parameter: str, group: Group, change: _Change) -> None:
        self._changes.setdefault(parameter, []).append((group.expert, change))

    def forget_copies(self) -> None:
        """Drop the copies that were made; they are made again when they are needed."""
        self._copies.clear()

    @property
    def changed(self) -> frozenset[str]:
        """Names of the parameters that are scaled."""
        return frozenset(self._changes)

    def is_changed(self, tensor: object) -> bool:
        return isinstance(tensor, torch.Tensor) and self.name_of(tensor) in self._changes

    def of(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the equalized copy of a parameter, or the parameter if nothing scales it.

        The weight of an expert is a part of the copy of the parameter that holds it.
        """
        parts: Mapping[torch.Tensor, tuple[str, int, int]] = self._parts
        if parameter in parts:
            stack, place, count = parts[parameter]
            if stack not in self._changes:
                return parameter
            return self.named(stack)[place // count].chunk(count)[place % count]
        name = self.name_of(parameter)
        if name is None or name not in self._changes:
            return parameter
        if name not in self._copies:
            self._copies[name] = self._scaled(parameter.detach(), self._changes[name])
        return self._copies[name]

    def named(self, name: str) -> torch.Tensor:
        """Return the equalized copy of the parameter of that name."""
        parameter = self._by_name[name]()
        if parameter is None:
            raise StatisticsError(f"the model is gone, and with it {name}")
        return self.of(parameter)

    def _scaled(
        self, value: torch.Tensor, changes: list[tuple[int | None, _Change]]
    ) -> torch.Tensor:
        of_experts: dict[int | None, list[_Change]] = {}
        for expert, change in changes:
            of_experts.setdefault(expert, []).append(change)
        if None in of_experts:
            assert len(of_experts) == 1, "a group scales all experts of a parameter, or none"
            return _changed(value, of_experts[None])
        scaled = value.clone()
        for expert, own in of_experts.items():  # one by one: all in a wider dtype take much room
            scaled[expert] = _changed(value[expert], own)
        return scaled


def _changed(value: torch.Tensor, changes: list[_Change]) -> torch.Tensor:
    wide = value.to(torch.promote_types(value.dtype, torch.float32), copy=True)
    for change in changes:
        wide = change(wide)
    return wide.to(value.dtype)


def _times_columns(scale: torch.Tensor) -> _Change:
    return lambda weight: weight * scale.to(weight)


def _divided(producer: Producer, scale: torch.Tensor) -> _Change:
    return lambda value: producer.divided(value, scale.to(value))
