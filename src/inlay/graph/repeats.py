"""Graphs that a graph calls more than once, such as a block that Dynamo traced once."""

import operator
from collections.abc import Sequence
from typing import Any

from torch.fx import GraphModule, Node

from inlay.errors import GraphError
from inlay.graph.editing import bodies_of, copy, switches_modes
from inlay.graph.higher_order import transformed_nodes
from inlay.graph.inputs import inputs_of
from inlay.graph.matching import transposed_by, weight_use
from inlay.graph.writes import writes_to_inputs

__all__ = ["RepeatedGraph", "repeated_graphs"]

_CALL = "invoke_subgraph"


class RepeatedGraph:
    """A graph that is called more than once, and its calls."""

    def __init__(self, body: GraphModule, calls: list[Node]) -> None:
        self.body = copy(body)
        self.calls = calls

    def operands(self, call: Node) -> tuple[Any, ...]:
        """Return what the body takes in a call."""
        return tuple(call.args[2:])


def repeated_graphs(gm: GraphModule) -> list[RepeatedGraph]:
    """Find the graphs that are called more than once and can be prepared on their own.

    A graph that writes to its operands cannot, nor one whose weights are computed around it, nor
    one that runs under a transform or in a mode that is switched around it.
    """
    if any(switches_modes(node) for node in gm.graph.nodes):
        return []
    _require_transforms(gm)
    transformed = transformed_nodes(gm.graph.nodes)
    calls: dict[GraphModule, list[Node]] = {}
    for node in gm.graph.nodes:
        if getattr(node.target, "__name__", "") == _CALL and node not in transformed:
            (body,) = bodies_of(node).values()
            calls.setdefault(body, []).append(node)
    return [
        RepeatedGraph(body, nodes)
        for body, nodes in calls.items()
        if len(nodes) > 1 and _stands_alone(body, nodes)
    ]


def _require_transforms(gm: GraphModule) -> None:
    """Refuse bodies with a `vmap`: Dynamo leaves out where one begins, for nothing reads that."""
    for node in gm.graph.nodes:
        if getattr(node.target, "__name__", "") != _CALL:
            continue
        for body in bodies_of(node).values():
            if any(getattr(n.target, "__name__", "") == "_add_batch_dim" for n in body.graph.nodes):
                raise GraphError(
                    f"node {node.name} calls a graph with a vmap, which Dynamo traces incompletely;"
                    " do not mark what holds it as a nested_compile_region"
                )


def _stands_alone(body: GraphModule, calls: Sequence[Node]) -> bool:
    inputs = inputs_of(body.graph)
    if not inputs or writes_to_inputs(body):
        return False
    uses = (weight_use(body, node) for node in body.graph.nodes)
    weights = {use.weight_node for use in uses if use is not None}
    operands = [operand for call in calls for operand in call.args[2:]]
    if any(transposed_by(operand) is not None for operand in operands):
        return False  # perhaps of a weight
    return all(
        _are_read_one_by_one(call, body)
        and all(
            operand.op in ("placeholder", "get_attr")
            for given, operand in zip(inputs, call.args[2:], strict=True)
            if given in weights and isinstance(operand, Node)
        )
        for call in calls
    )


def _are_read_one_by_one(call: Node, body: GraphModule) -> bool:
    (output,) = body.graph.find_nodes(op="output")
    return isinstance(output.args[0], (tuple, list)) and all(
        user.target is operator.getitem and isinstance(user.args[1], int) for user in call.users
    )
