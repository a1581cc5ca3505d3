"""Where a graph writes to values in place: the same node may then hold another value later."""

from collections.abc import Iterable

import torch
from torch.fx import Graph, GraphModule, Node

from inlay.graph.editing import leaves, mutates
from inlay.graph.shapes import fake_value
from inlay.torch_private import (
    HigherOrderOperator,
    OpOverload,
    OpOverloadPacket,
    share_memory,
    written_operands,
)

__all__ = ["Writes", "writes_to_inputs"]


class Writes:
    """The ops of a graph that write in place, as it is when this is made.

    Two readers of a node see the same value if as many of these ops wrote to it before the one as
    before the other. A write to a view counts for everything that shares its memory.
    """

    def __init__(self, graph: Graph) -> None:
        self._position = {node: index for index, node in enumerate(graph.nodes)}
        self._writes = [
            (index, written)
            for node, index in self._position.items()
            if mutates(node)
            for written in _written_by(node)
        ]

    def before(self, node: Node, value: Node) -> int:
        """How many ops write to the value before a node."""
        return self._count(value, self._position[node])

    def up_to(self, node: Node, value: Node) -> int:
        """How many ops write to the value before a node, and by it."""
        return self._count(value, self._position[node] + 1)

    def _count(self, value: Node, end: int) -> int:
        return sum(
            index < end and _may_share_memory(written, value) for index, written in self._writes
        )


def writes_to_inputs(gm: GraphModule) -> bool:
    """Whether a graph changes what it is called with."""
    writes = Writes(gm.graph)
    (output,) = gm.graph.find_nodes(op="output")
    inputs = gm.graph.find_nodes(op="placeholder")
    return any(writes.before(output, value) for value in inputs)


def _written_by(node: Node) -> Iterable[Node]:
    """The operands that an op writes to."""
    if isinstance(node.target, HigherOrderOperator):
        return node.all_input_nodes
    if isinstance(node.target, (OpOverload, OpOverloadPacket)):
        found = written_operands(node.target, node.args, node.kwargs)
    elif node.kwargs.get("out") is not None:
        found = [node.kwargs["out"]]
    else:
        found = [node.args[0] if node.args else node.kwargs.get("input")]
    return (value for value in leaves(found) if isinstance(value, Node))


def _may_share_memory(one: Node, other: Node) -> bool:
    """Whether two nodes may be the same tensor, or views of the same one."""
    if one is other:
        return True
    values, others = (_tensors(node) for node in (one, other))
    if values is None or others is None:
        return True  # nothing is known of one of them
    return any(share_memory(a, b) for a in values for b in others)


def _tensors(node: Node) -> list[torch.Tensor] | None:
    value = fake_value(node)
    return None if value is None else [v for v in leaves(value) if isinstance(v, torch.Tensor)]
