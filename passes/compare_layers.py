"""Compare every quantized layer with itself, inside the plain model."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from inlay.graph import (
    ErrorSums,
    Pass,
    PassResult,
    WeightOf,
    WeightUse,
    add_input,
    add_qparams,
    copy,
    fake_value,
    is_linear,
    require_whole,
    slots_of,
    stamp,
    weight_use,
)
from inlay.model import PRODUCTS
from inlay.nodes.compare_layer import POWERS, CompareLayer
from inlay.nodes.quantize import QuantizeDequantize
from inlay.nodes.routing import routing_of
from inlay.observers import QParamsDict
from inlay.recipe import Plan, Slot

__all__ = ["CompareLayers"]


@dataclass(frozen=True, kw_only=True)
class CompareLayers(Pass):
    """Put a compare node behind each op of a quantized Linear; what the graph computes stays.

    Before:                                      After:
        x, w                                         x, w, fc_weight_folded, fc_errors, ...
        y = linear(x, w)  # fc.weight, fc.input      y = linear(x, w)
        return y                                     compare_layer(x, y, w, ...)
                                                     return y

    The node feeds the layer the same input with input and weight quantized, and adds the powers of
    signal and error to sums that are inputs of the graph. A product with a stack of weights is
    compared for each weight. The graph has to run eagerly.
    """

    plan: Plan
    qparams: Mapping[str, QParamsDict]

    def requires(self, gm: GraphModule) -> None:
        require_whole(gm)

    def call(self, gm: GraphModule) -> PassResult:
        gm = copy(gm)
        compared = {n.args[1] for n in gm.graph.nodes if isinstance(n.target, CompareLayer)}
        modified = False
        for node in list(gm.graph.nodes):
            slots = {
                base_name: slot
                for base_name, slot in slots_of(node).items()
                if base_name in ("weight", "input") and slot.is_quantized(self.qparams)
            }
            use = weight_use(gm, node)
            if use is None or use.kind not in PRODUCTS:
                continue
            if not slots or use.value is None or use.output in compared:
                continue
            compare = self._insert(gm, node, use, slots)
            compare.meta["nn_module_stack"] = node.meta.get("nn_module_stack")
            modified = True
        gm.recompile()
        return PassResult(gm, modified)

    def _insert(
        self, gm: GraphModule, node: Node, use: WeightUse, slots: Mapping[str, Slot]
    ) -> Node:
        weight = use.weight_node
        if weight is None:  # the op is a call of the module, which has the weight
            with gm.graph.inserting_before(node):
                weight = stamp(gm.graph.get_attr(f"{node.target}.weight"), self.name)
                weight.meta["example_value"] = use.weight
        folded = weight
        if "weight" in slots:
            what = WeightOf(slots["weight"].name)
            folded = add_input(gm.graph, what, fake_value(weight), self.name)
        any_slot = next(iter(slots.values()))
        views = tuple(view.nameless for view in self.plan.weights_of(any_slot.module))
        sums = torch.zeros(len(views), len(POWERS), dtype=torch.float64)
        errors = add_input(gm.graph, ErrorSums(any_slot.module), sums, self.name)
        args = [use.value, use.output, weight, folded, errors]
        routing = routing_of(node) if use.kind == "grouped" else None
        whose: dict[str, Any] = {}
        if routing is not None:
            whose = {"ends": routing.ends, "token_of_row": routing.tokens}
        read = slots.get("input")
        names: tuple[str, ...] = ()
        if read is not None:
            assert use.value is not None
            qparams = add_qparams(
                gm.graph, read.name, read.used_of(self.qparams), fake_value(use.value), self.name
            )
            args += qparams.values()
            names = tuple(qparams)
        quantize = None if read is None else QuantizeDequantize(read.args, names)
        with gm.graph.inserting_after(use.output):
            target = CompareLayer(views, quantize, is_product=_is_product(node, use))
            compare: Node = gm.graph.call_function(target, tuple(args), whose)
        return stamp(compare, self.name)


def _is_product(node: Node, use: WeightUse) -> bool:
    """Return whether an op returns the product in float32, to which nothing was added."""
    if not is_linear(node) or use.value is None or use.weight_node is None:
        return False
    bias = node.args[2] if len(node.args) > 2 else node.kwargs.get("bias")
    operands = map(fake_value, (use.value, use.weight_node))
    return bias is None and all(operand.dtype == torch.float32 for operand in operands)
