"""Fold quantization parameters into the graph."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from torch.fx import GraphModule, Node

from inlay.graph import (
    Pass,
    PassResult,
    WeightOf,
    Writes,
    add_input,
    add_qparams,
    as_function,
    attention_states,
    copy,
    fake_value,
    folded_parts,
    mark_folded,
    observes,
    replace_value,
    replace_weight,
    require_nodes,
    require_whole,
    slots_of,
    stamp,
    weight_use,
)
from inlay.nodes.quantize import QuantizeDequantize
from inlay.nodes.routing import Routing, routing_of
from inlay.observers import QParamsDict
from inlay.ranges.args import key_of
from inlay.recipe import Slot

__all__ = ["FoldQParams"]


@dataclass(frozen=True, kw_only=True)
class FoldQParams(Pass):
    """Put quantize-dequantize where the observers stand, and the quantized weight in its place.

    Before:                                After:
        x, w, fc_input_seen, ...               x, w, fc_weight_folded, fc_input_scale, ...
        observe_weight(w)                      observe_weight(w)
        observe(x, fc_input_seen, ...)         observe(x, fc_input_seen, ...)
        y = linear(x, w)                       x_q = quantize_dequantize(x, fc_input_scale, ...)
        return y                               y = linear(x_q, fc_weight_folded)
                                               return y

    The weight is quantized once, beforehand, never in the graph. Scales and weights are inputs, so
    that identical blocks share a graph; `inlay.graph.bind` makes them constants. Slots that are
    quantized dynamically compute their scales in the graph. A slot without qparams stays in full
    precision.
    """

    keeps_function: ClassVar[bool] = False
    qparams: Mapping[str, QParamsDict]

    def requires(self, gm: GraphModule) -> None:
        require_whole(gm)

    def call(self, gm: GraphModule) -> PassResult:
        gm = copy(gm)
        modified = False
        shared = {slot.name: observes(n)[0].name for n in gm.graph.nodes for slot in observes(n)}
        done: dict[tuple[Any, ...], Node] = {}
        writes = Writes(gm.graph)
        for node in list(gm.graph.nodes):
            to_fold = [
                slot
                for base_name, slot in slots_of(node).items()
                if base_name not in folded_parts(node) and slot.is_quantized(self.qparams)
            ]
            if not to_fold:
                continue
            changes = partial(writes.before, node)
            node = as_function(gm, node, self.name)
            for slot in to_fold:
                if slot.is_weight:
                    self._fold_weight(gm, node, slot)
                else:
                    owner = shared.get(slot.name, slot.name)
                    self._quantize(gm, node, slot, owner, done, changes)
                mark_folded(node, slot.base_name)
            modified = True
        gm.recompile()
        return PassResult(gm, modified)

    def ensures(self, gm: GraphModule) -> None:
        left = (
            node
            for node in gm.graph.nodes
            for base_name, slot in slots_of(node).items()
            if slot.is_quantized(self.qparams) and base_name not in folded_parts(node)
        )
        require_nodes(left, "qparams are not folded into these ops")

    def _fold_weight(self, gm: GraphModule, node: Node, slot: Slot) -> None:
        use = weight_use(gm, node)
        assert use is not None
        assert use.weight_node is not None
        folded = add_input(gm.graph, WeightOf(slot.name), fake_value(use.weight_node), self.name)
        replace_weight(node, folded)

    def _quantize(
        self,
        gm: GraphModule,
        node: Node,
        slot: Slot,
        owner: str,
        done: dict[tuple[Any, ...], Node],
        changes: Callable[[Node], int],
    ) -> None:
        value = _value(gm, node, slot.base_name)
        # A value that was changed in place since it was quantized has to be quantized again.
        key = (value, owner if slot.is_observed else key_of(slot.args), changes(value))
        if key not in done or slot.base_name == "output":
            inputs = add_qparams(
                gm.graph, owner, slot.used_of(self.qparams), fake_value(value), self.name
            )
            routing = _routing_of(gm, node)
            whose: dict[str, Any] = {} if routing is None else {"ends": routing.ends}
            at = (
                gm.graph.inserting_after(value)
                if slot.base_name == "output"
                else gm.graph.inserting_before(node)
            )
            with at:
                quantized = gm.graph.call_function(
                    QuantizeDequantize(slot.args, tuple(inputs)), (value, *inputs.values()), whose
                )
            quantized.meta["example_value"] = fake_value(value)
            quantized.meta["nn_module_stack"] = node.meta.get("nn_module_stack")
            done[key] = stamp(quantized, self.name)
        quantized = done[key]
        if slot.base_name == "output":
            value.replace_all_uses_with(
                quantized, delete_user_cb=lambda user: user is not quantized and not observes(user)
            )
        else:
            replace_value(node, slot.base_name, value, quantized)


def _routing_of(gm: GraphModule, node: Node) -> Routing | None:
    """Return how the rows of its input reach the matrices of an op; None if it has only one."""
    use = weight_use(gm, node)
    return routing_of(node) if use is not None and use.kind == "grouped" else None


def _value(gm: GraphModule, node: Node, base_name: str) -> Node:
    """What of an op is quantized."""
    states = attention_states(node)
    if states is not None:
        return states[base_name]
    use = weight_use(gm, node)
    assert use is not None
    value = use.output if base_name == "output" else use.value
    assert value is not None
    return value
