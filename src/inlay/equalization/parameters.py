"""The parameters of a model as equalization leaves them, in copies of its own."""

import weakref
from collections.abc import Callable, Mapping

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from inlay.equalization.group import Group, Producer
from inlay.errors import StatisticsError

__all__ = ["EqualizedParameters"]

_Change = Callable[[torch.Tensor], torch.Tensor]


class EqualizedParameters:
    """The parameters of a model by identity, and copies of those that groups scale.

    Parameters are referred to weakly: compiled code may outlive the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._names: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._by_name: dict[str, weakref.ref[torch.Tensor]] = {}
        self._first_name: dict[str, str] = {}  # of parameters that have several, by each
        for name, parameter in model.named_parameters(remove_duplicate=False):
            first = self._first_name[name] = self._names.setdefault(parameter, name)  # type: ignore[no-untyped-call]
            self._by_name[first] = weakref.ref(parameter)
        # With the index of the matrix that is changed, if the parameter is a stack.
        self._changes: dict[str, list[tuple[int | None, _Change]]] = {}
        self._copies: dict[str, torch.Tensor] = {}

    def name_of(self, tensor: torch.Tensor | None) -> str | None:
        """Return the first name that a parameter has in the model; None for other tensors."""
        known: Mapping[torch.Tensor, str] = self._names
        return None if tensor is None else known.get(tensor)

    def first_name(self, name: str) -> str:
        """Return the first of the names that a parameter has in the model."""
        return self._first_name[name]

    def scale(
        self, groups: Mapping[Group, torch.Tensor], parameter_of: Callable[[str], str]
    ) -> None:
        """Have groups scaled from now on.

        :param groups: the scale of each channel, by group
        :param parameter_of: names the parameter that holds the weight of a reader
        """
        self._changes.clear()
        self._copies.clear()
        for group, scale in groups.items():
            for weight in dict.fromkeys(map(parameter_of, group.readers)):
                self._add(weight, group, _times_columns(scale))
            for producer in group.producers:
                own = group.scale_of(producer, scale)
                self._add(producer.parameter, group, _divided(producer, own))

    def _add(self, parameter: str, group: Group, change: _Change) -> None:
        self._changes.setdefault(parameter, []).append((group.index, change))

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
        """Return the equalized copy of a parameter, or the parameter if nothing scales it."""
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
        by_index: dict[int | None, list[_Change]] = {}
        for index, change in changes:
            by_index.setdefault(index, []).append(change)
        if None in by_index:
            assert len(by_index) == 1, "a parameter is scaled as a whole, or matrix by matrix"
            return _changed(value, by_index[None])
        scaled = value.clone()
        for index, own in by_index.items():  # one by one: all in a wider dtype take much room
            scaled[index] = _changed(value[index], own)
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
