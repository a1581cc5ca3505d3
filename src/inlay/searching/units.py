"""Units: the layers that a server runs as one, so that they share a format."""

import re
from collections.abc import Hashable, Iterator
from dataclasses import dataclass

from inlay.calibration import Calibration
from inlay.recipe import Slot

__all__ = ["Unit", "find_units"]


@dataclass(frozen=True, kw_only=True)
class Unit:
    """Layers that share a format.

    :param layers: the names of their modules, in the order of the model
    :param targets: how a recipe names them
    :param is_stack: whether they are experts; loaders expect all or none to be quantized
    """

    layers: tuple[str, ...]
    targets: tuple[str, ...]
    is_stack: bool = False


def find_units(calibration: Calibration) -> list[Unit]:
    """Group layers that share a format, according to the graph and the plan.

    Layers of one module that read one value are served as one product: query, key and value, or
    gate and up. All experts of a module are, and modules that share a weight store it once.

    :param calibration: has observed the inputs of all layers
    """
    known = {name: place for place, name in enumerate(calibration.plan.weights)}
    groups: dict[Hashable, str] = {}
    leader = {name: name for name in known}

    def first(name: str) -> str:
        while leader[name] != name:
            name = leader[name]
        return name

    for name in known:
        for key in _keys(calibration, name):
            one, other = first(groups.setdefault(key, name)), first(name)
            leader[max(one, other, key=known.__getitem__)] = min(one, other, key=known.__getitem__)
    members: dict[str, list[str]] = {}
    for name in known:
        members.setdefault(first(name), []).append(name)
    return [_unit(calibration, own) for own in members.values()]


def _keys(calibration: Calibration, name: str) -> Iterator[Hashable]:
    """Yield the properties that layers of one format share."""
    plan, view = calibration.plan, calibration.plan.weights[name]
    yield "weight", calibration.graphs.weights.place(view)
    if view.index is not None:
        yield "stack", view.parameter.rpartition(".")[0]
        return
    slot: Slot = plan.slots[f"{name}.weight"].hessian
    shared = calibration.statistics.shared_with(slot)
    if shared:
        yield "value", shared[0].name, name.rpartition(".")[0]


def _unit(calibration: Calibration, layers: list[str]) -> Unit:
    views = [calibration.plan.weights[name] for name in layers]
    is_stack = any(view.index is not None for view in views)
    targets = dict.fromkeys(
        name if view.index is None else f"re:^{re.escape(_holder(view.parameter))}[.].*"
        for name, view in zip(layers, views, strict=True)
    )
    return Unit(layers=tuple(layers), targets=tuple(targets), is_stack=is_stack)


def _holder(parameter: str) -> str:
    return parameter.rpartition(".")[0]
