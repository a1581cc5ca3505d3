"""Tensors that graphs take besides the model's own inputs: statistics, qparams, weights."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule

from inlay.equalization.equalization import Equalization
from inlay.graph import (
    PaddingMask,
    bind,
    fake_value,
    inputs_of,
    observes,
    slot_inputs,
    tensor_of,
)
from inlay.nodes.compare_layer import POWERS
from inlay.nodes.kernels import column_sums
from inlay.nodes.observe import Observe
from inlay.padding.of_batch import Padding
from inlay.recipe import Slot
from inlay.statistics.by_slot import StatisticsBySlot
from inlay.steps.weights import Weights

__all__ = ["Bindings", "GivenInput", "given_inputs"]


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

    def errors_of(self, slot: Slot, device: torch.device | None) -> torch.Tensor:
        """Return the sums that compare nodes of a module or stack add to, a row for each weight."""
        if slot.module not in self._error_sums:
            views = self.statistics.plan.weights_of(slot.module)
            sums = torch.zeros(len(views), len(POWERS), dtype=torch.float64, device=device)
            self._error_sums[slot.module] = sums
            modules = (view.module for view in views)
            self.layer_errors.update(zip(modules, sums, strict=True))
        return self._error_sums[slot.module]

    def quantized_value(self, slot: Slot, key: str) -> torch.Tensor:
        """Return a qparam of a slot, or its weight: folded, as integers, or the sums of these."""
        qparams, plan = self.statistics.qparams, self.statistics.plan
        assert qparams is not None
        if key == "folded":
            return self.weights.folded(slot.module, qparams)
        if key in ("integers", "sums"):
            integers = self.weights.integers(plan.weights[slot.module], qparams)
            return integers if key == "integers" else column_sums(integers)
        value = plan.used_by_op(slot, qparams)[key]
        assert isinstance(value, torch.Tensor)
        return value

    def bound(self, gm: GraphModule) -> GraphModule:
        """A finalized graph with its scales and weights as constants."""
        plan, equalized = self.statistics.plan, self.weights.equalized
        constants = {
            what: (
                equalized.named(what.slot)
                if what.key == "equalized"
                else self.quantized_value(plan.slot_named(what.slot), what.key)
            )
            for what in slot_inputs(gm.graph).values()
        }
        return bind(gm, constants)


@dataclass(frozen=True)
class GivenInput:
    """An input that a pass added to a graph, such as one of the statistics of slots, or a qparam.

    :param slots: as they were traced
    :param observe: what observes them; None for a qparam or a folded weight
    :param position: of the parameter among the inputs whose equalized copy this is
    :param mask: which padding mask it is, if it is one
    """

    key: str
    slots: tuple[Slot, ...]
    observe: Observe | None
    device: torch.device | None
    position: int | None = None
    mask: PaddingMask | None = None

    def tensor(
        self,
        bindings: Bindings,
        names: dict[str, str],
        args: Sequence[Any],
        observers: dict[str, Mapping[str, torch.Tensor]],
    ) -> torch.Tensor | PaddingMask:
        """Return the tensor to pass, or which mask, as each batch has its own.

        :param names: from modules as they were traced to those that the graph is called for
        :param args: what the graph is called with
        :param observers: inputs of observers that were asked for before; each has several
        """
        if self.mask is not None:
            return self.mask
        if self.position is not None:
            return bindings.weights.equalized.of(args[self.position])
        if self.observe is not None and self.slots[0].name in observers:
            return observers[self.slots[0].name][self.key]
        slots = [_renamed(slot, names) for slot in self.slots]
        if self.key == "errors":
            return bindings.errors_of(slots[0], self.device)
        if self.observe is None:
            return bindings.quantized_value(slots[0], self.key)
        inputs = observers[self.slots[0].name] = self._inputs(bindings, slots)
        return inputs[self.key]

    def _inputs(self, bindings: Bindings, slots: Sequence[Slot]) -> Mapping[str, torch.Tensor]:
        """What the observer of these slots takes besides the value, by name."""
        assert self.observe is not None
        assert self.device is not None  # statistics are tensors
        specs = None if self.observe.is_opaque else self.observe.specs
        known = bindings.statistics
        rule, in_graph = self.observe.rule, self.observe.in_graph
        if self.observe.groups is not None:
            grouped = known.grouped_entry(slots, rule, specs, self.device)
            return grouped.inputs(in_graph=in_graph)
        return known.entry(slots, rule, specs, self.device).inputs()


def given_inputs(gm: GraphModule, bindings: Bindings) -> list[GivenInput]:
    """The inputs that passes added to a graph, in order."""
    plan, equalized = bindings.statistics.plan, bindings.weights.equalized
    positions = {
        equalized.name_of(tensor_of(gm, node)): position
        for position, node in enumerate(inputs_of(gm.graph))
    }
    observers: dict[str, tuple[tuple[Slot, ...], Observe]] = {}
    for node in gm.graph.nodes:
        if isinstance(node.target, Observe):
            slots = observes(node)
            observers[slots[0].name] = (slots, node.target)
    result = []
    for node, what in slot_inputs(gm.graph).items():
        if isinstance(what, PaddingMask):
            result.append(GivenInput(what.key, (), None, None, mask=what))
            continue
        if what.key == "equalized":
            result.append(GivenInput(what.key, (), None, None, positions[what.slot]))
            continue
        slots, observe = observers.get(what.slot, ((), None))
        slots = slots or (plan.slot_named(what.slot),)
        device = getattr(fake_value(node), "device", None)
        result.append(GivenInput(what.key, slots, observe, device))
    return result


def _renamed(slot: Slot, names: dict[str, str]) -> Slot:
    """The slot of the module that takes this one's place in the graph."""
    if slot.module in names:
        return slot.moved_to(names[slot.module])
    for old, new in names.items():  # an attention module is known by a weight inside it
        inside = old.removeprefix(f"{slot.module}.")
        if inside != old and new.endswith(f".{inside}"):
            return slot.moved_to(new.removesuffix(f".{inside}"))
    return slot
