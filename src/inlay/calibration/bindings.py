"""Tensors that graphs take besides the model's own inputs: statistics, qparams, weights."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule

from inlay.equalization.equalization import Equalization
from inlay.graph import (
    EqualizedOf,
    ErrorSums,
    GraphInput,
    IntegersOf,
    IntegerSumsOf,
    PaddingMask,
    QParamOf,
    StatisticOf,
    WeightOf,
    added_inputs,
    bind,
    fake_value,
    inputs_of,
    observes,
    tensor_of,
)
from inlay.nodes.compare_layer import POWERS
from inlay.nodes.kernels import column_sums
from inlay.nodes.observe import Observe
from inlay.padding.of_batch import Padding
from inlay.recipe import Slot
from inlay.statistics.by_slot import StatisticsBySlot
from inlay.steps.weights import Weights

__all__ = ["Bindings", "GivenInputs"]


class Bindings:
    """The tensors of one calibration that its graphs take as inputs.

    :param equalization: takes in what graphs say about it
    :param padding: that of the batch that runs
    """

    def __init__(
        self,
        statistics: StatisticsBySlot,
        weights: Weights,
        equalization: Equalization,
        padding: Padding,
    ) -> None:
        self.statistics = statistics
        self.weights = weights
        self.equalization = equalization
        self.layer_errors: dict[str, torch.Tensor] = {}  # sums of compare nodes, by module
        self._error_sums: dict[str, torch.Tensor] = {}  # the same, of all weights that an op reads
        self.padding = padding

    def with_own_weights(self) -> "Bindings":
        """Return bindings that keep folded weights, and errors of layers, for themselves."""
        weights = self.weights.with_own_cache()
        return Bindings(self.statistics, weights, self.equalization, self.padding)

    def errors_of(self, module: str, device: torch.device | None) -> torch.Tensor:
        """Return the sums that compare nodes of a module or stack add to, a row for each weight."""
        if module not in self._error_sums:
            views = self.statistics.plan.weights_of(module)
            sums = torch.zeros(len(views), len(POWERS), dtype=torch.float64, device=device)
            self._error_sums[module] = sums
            modules = (view.module for view in views)
            self.layer_errors.update(zip(modules, sums, strict=True))
        return self._error_sums[module]

    def qparam(self, slot: Slot, name: str) -> torch.Tensor:
        """Return a qparam of a slot, or of all weights of a stack."""
        assert self.statistics.qparams is not None
        value = self.statistics.plan.used_by_op(slot, self.statistics.qparams)[name]
        assert isinstance(value, torch.Tensor)
        return value

    def folded(self, slot: Slot) -> torch.Tensor:
        """Return the weight of a slot, or all weights of a stack, quantized."""
        assert self.statistics.qparams is not None
        return self.weights.folded(slot.module, self.statistics.qparams)

    def integers(self, slot: Slot) -> torch.Tensor:
        """Return the weight of a slot as integers."""
        plan, qparams = self.statistics.plan, self.statistics.qparams
        assert qparams is not None
        return self.weights.integers(plan.weights[slot.module], qparams)

    def bound(self, gm: GraphModule) -> GraphModule:
        """Return a finalized graph with its scales and weights as constants."""
        given = GivenInputs.of(gm, self)
        found = zip(given.inputs, given.resolve(self, {}), strict=True)
        return bind(gm, {what: value for what, value in found if isinstance(value, torch.Tensor)})


@dataclass(frozen=True, kw_only=True)
class GivenInputs:
    """The inputs that passes added to a graph, and what they are resolved with.

    :param inputs: in the order of the graph, with their devices
    :param observers: what observes which slots, by the first of them
    :param positions: of parameters among the inputs of the model, by name
    """

    inputs: Mapping[GraphInput, torch.device | None]
    observers: Mapping[str, tuple[tuple[Slot, ...], Observe]]
    positions: Mapping[str | None, int]

    @classmethod
    def of(cls, gm: GraphModule, bindings: Bindings) -> "GivenInputs":
        equalized = bindings.weights.equalized
        return cls(
            inputs={
                what: getattr(fake_value(node), "device", None)
                for node, what in added_inputs(gm.graph).items()
            },
            observers={
                slots[0].name: (slots, node.target)
                for node in gm.graph.nodes
                if isinstance(node.target, Observe) and (slots := observes(node))
            },
            positions={
                equalized.name_of(tensor_of(gm, node)): position
                for position, node in enumerate(inputs_of(gm.graph))
            },
        )

    def resolve(
        self, bindings: Bindings, names: Mapping[str, str], args: Sequence[Any] | None = None
    ) -> list[torch.Tensor | PaddingMask]:
        """Return the tensors to pass. Masks stay, because each batch has its own.

        :param names: from modules as they were traced to those that the graph is called for
        :param args: arguments of the graph; None for the parameters it was traced with
        """
        observing: dict[str, Mapping[str, torch.Tensor]] = {}  # each observer has several inputs
        slot_named, equalized = bindings.statistics.plan.slot_named, bindings.weights.equalized
        found: list[torch.Tensor | PaddingMask] = []
        for what, device in self.inputs.items():
            match what:
                case PaddingMask():
                    found.append(what)
                case EqualizedOf(name) if args is None:
                    found.append(equalized.named(name))
                case EqualizedOf(name):
                    assert args is not None
                    found.append(equalized.of(args[self.positions[name]]))
                case StatisticOf(slot, name):
                    if slot not in observing:
                        observing[slot] = self._of_observer(bindings, slot, names, device)
                    found.append(observing[slot][name])
                case QParamOf(slot, name):
                    found.append(bindings.qparam(_renamed(slot_named(slot), names), name))
                case WeightOf(slot):
                    found.append(bindings.folded(_renamed(slot_named(slot), names)))
                case IntegersOf(slot):
                    found.append(bindings.integers(_renamed(slot_named(slot), names)))
                case IntegerSumsOf(slot):
                    integers = bindings.integers(_renamed(slot_named(slot), names))
                    found.append(column_sums(integers))
                case ErrorSums(module):
                    found.append(bindings.errors_of(names.get(module, module), device))
        return found

    def _of_observer(
        self, bindings: Bindings, slot: str, names: Mapping[str, str], device: torch.device | None
    ) -> Mapping[str, torch.Tensor]:
        """Return what the observer of a slot takes besides the value, by name."""
        traced, observe = self.observers[slot]
        slots = [_renamed(each, names) for each in traced]
        specs = None if observe.is_opaque else observe.specs
        assert device is not None, "statistics are tensors"
        return bindings.statistics.entry(slots, observe.rule, specs, device).inputs()


def _renamed(slot: Slot, names: Mapping[str, str]) -> Slot:
    """The slot of the module that takes this one's place in the graph."""
    if slot.module in names:
        return slot.moved_to(names[slot.module])
    for old, new in names.items():  # an attention module is known by a weight inside it
        inside = old.removeprefix(f"{slot.module}.")
        if inside != old and new.endswith(f".{inside}"):
            return slot.moved_to(new.removesuffix(f".{inside}"))
    return slot
