"""Put observers into the graph."""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from inlay.errors import GraphError
from inlay.graph import (
    Pass,
    PassResult,
    StatisticOf,
    Writes,
    add_input,
    attention_states,
    copy,
    fake_value,
    mark_observer,
    observes,
    require_whole,
    slots_of,
    stamp,
    weight_use,
)
from inlay.nodes.every_token import Everywhere
from inlay.nodes.observe import Observe, ObserveWeight
from inlay.nodes.routing import routing_of
from inlay.recipe import Experts, Gathers, Slot
from inlay.statistics.rule import Rule

__all__ = ["InsertObservers"]


@dataclass(frozen=True, kw_only=True)
class InsertObservers(Pass):
    """Place one observe node at each annotated value, with its state as inputs of the graph.

    Before:                                      After:
        x, w                                         x, w, fc_input_seen, fc_input_max_vals, ...
        y = linear(x, w)  # fc.weight, fc.input      observe_weight(w)
        return y                                     observe(x, fc_input_seen, ...)
                                                     y = linear(x, w)
                                                     return y

    The node stands right before the op that reads the value, so it sees what the op sees even if
    the value was changed in place before. Outputs are observed right after the op. A weight is the
    same for every batch; its node marks the place and runs once, at finalize. The input of a
    product with a stack of weights is observed for each matrix by itself.

    Where the channels of an input are observed so that it can be equalized, an observer that has to
    see the equalized input is left to a second run over the data, which observes nothing else.

    :param experts: which tokens an expert is observed with; "all" adds ops that send it every one
    :param second_run: whether the graph is that of the second run
    """

    experts: Experts = "routed"
    second_run: bool = False

    def call(self, gm: GraphModule) -> PassResult:
        gm = copy(gm)
        writes = Writes(gm.graph)
        there = {
            (slot.name, node.args[0], writes.before(node, node.args[0]))
            for node in gm.graph.nodes
            for slot in observes(node)
        }
        observed = {name for name, _, _ in there}
        targets = _Targets()
        everywhere = Everywhere(gm.graph, self.name) if self.experts == "all" else None
        modified = False
        for node in list(gm.graph.nodes):
            for slot in slots_of(node).values():
                value = _value(gm, node, slot.base_name)
                if value is None or not self._is_wanted(node, slot):
                    continue
                # A module may be called twice with a value that is changed in between.
                is_output = slot.base_name == "output"
                changes = writes.up_to(value, value) if is_output else writes.before(node, value)
                if (slot.name, value, changes) in there:
                    continue
                groups = _groups_of(gm, node)
                if everywhere is not None and groups is not None and slot.name in observed:
                    continue
                self._insert(gm.graph, node, value, slot, targets, groups, everywhere)
                there.add((slot.name, value, changes))
                modified = True
        gm.recompile()
        return PassResult(gm, modified)

    def requires(self, gm: GraphModule) -> None:
        require_whole(gm)
        annotated = {s.name: s for node in gm.graph.nodes for s in slots_of(node).values()}
        for node in gm.graph.nodes:
            for slot in observes(node):
                if annotated.get(slot.name, slot) != slot:
                    raise GraphError(
                        f"{slot.name} is observed at node {node.name} for another recipe; run "
                        "RemoveObservers before annotating the graph with this one"
                    )

    def ensures(self, gm: GraphModule) -> None:
        observed = {slot.name for node in gm.graph.nodes for slot in observes(node)}
        for node in gm.graph.nodes:
            for slot in slots_of(node).values():
                if self._is_wanted(node, slot) and slot.name not in observed:
                    raise GraphError(f"{slot.name} at node {node.name} is not observed")

    def _is_wanted(self, node: Node, slot: Slot) -> bool:
        """Whether a slot of an op is observed, in this run over the data."""
        gathered = {other.gathers for other in slots_of(node).values()}
        is_left_for_second = Gathers.CHANNELS in gathered and slot.sees_scaled
        return slot.is_observed and (slot.is_weight or is_left_for_second == self.second_run)

    def _insert(
        self,
        graph: Graph,
        node: Node,
        value: Node,
        slot: Slot,
        targets: "_Targets",
        groups: int | None,
        everywhere: Everywhere | None,
    ) -> None:
        rule = Rule(slot)
        if slot.base_name == "weight":
            with graph.inserting_before(node):
                self._mark(graph.call_function(ObserveWeight(rule), (value,)), node, slot)
            return
        for observed, ends, first in _observed(node, value, groups, everywhere):
            fake = fake_value(observed)
            if not isinstance(fake, torch.Tensor):
                raise GraphError(
                    f"node {observed.name}, observed as {slot.name}, has no shape; trace with "
                    "example inputs, or call inlay.graph.propagate_shapes first"
                )
            target = replace(targets.find(rule, fake, groups), first=first)
            inputs = [
                add_input(graph, StatisticOf(slot.name, name), tensor, self.name)
                for name, tensor in target.fake_inputs(fake).items()
            ]
            whose: dict[str, Any] = {} if ends is None else {"ends": ends}
            is_output = slot.base_name == "output"
            with graph.inserting_after(value) if is_output else graph.inserting_before(node):
                self._mark(graph.call_function(target, (observed, *inputs), whose), node, slot)

    def _mark(self, observe: Node, node: Node, slot: Slot) -> None:
        mark_observer(observe, (slot,))
        observe.meta["nn_module_stack"] = node.meta.get("nn_module_stack")
        stamp(observe, self.name)


def _observed(
    node: Node, value: Node, groups: int | None, everywhere: Everywhere | None
) -> Iterator[tuple[Node, Node | None, int]]:
    """Yield the observed values: the value itself, or the inputs of chunks of experts.

    :return: the value, where the rows of each group end, and the number of the first group
    """
    routing = None if groups is None else routing_of(node)
    if routing is None or groups is None or everywhere is None:
        yield value, None if routing is None else routing.ends, 0
        return
    for chunk, rows, ends in everywhere.values(node, value, routing, groups):
        yield rows, ends, chunk.start


def _value(gm: GraphModule, node: Node, base_name: str) -> Node | None:
    """Find the node that a slot of this op observes."""
    states = attention_states(node)
    if states is not None:
        return node if base_name == "output" else states.get(base_name)
    use = weight_use(gm, node)
    if use is not None and base_name == "output":
        return use.output
    if use is None or base_name != "weight":
        return None if use is None else use.value
    if use.weight_node is not None:
        return use.weight_node
    target = f"{node.target}.weight"  # the op calls the module, which has the weight
    existing: list[Node] = [n for n in gm.graph.find_nodes(op="get_attr") if n.target == target]
    if existing:
        return existing[0]
    with gm.graph.inserting_before(node):
        attribute: Node = gm.graph.get_attr(target)
    return stamp(attribute, InsertObservers.__name__)


def _groups_of(gm: GraphModule, node: Node) -> int | None:
    """Count the matrices of the stack that an op multiplies by; None for all other ops."""
    use = weight_use(gm, node)
    if use is None or use.kind != "grouped" or use.weight_node is None:
        return None
    return len(fake_value(use.weight_node))


class _Targets:
    """Make targets of observe nodes, tracing each kind of slot once: a model repeats its blocks."""

    def __init__(self) -> None:
        self._known: dict[Any, Observe] = {}

    def find(self, rule: Rule, value: torch.Tensor, groups: int | None) -> Observe:
        kind = (rule, str(tuple(value.shape)), value.dtype, value.device, groups)
        if kind not in self._known:
            self._known[kind] = _traced(rule, value, groups)
        return self._known[kind]


def _traced(rule: Rule, value: torch.Tensor, groups: int | None) -> Observe:
    target = Observe.traced(rule, value, groups)
    if target.is_opaque:
        # Leave out the slot's name: Python shows the same text for all slots only once.
        warnings.warn(
            f"observer {rule.name} cannot be traced and runs outside the compiled graph: "
            f"{target.reason}",
            stacklevel=2,
        )
    return target
