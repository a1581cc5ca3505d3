"""Send every token through every expert, beside the routing of the model, to calibrate."""

import math
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from inlay.errors import GraphError
from inlay.graph import annotate, fake_value, stamp, tensor_op
from inlay.nodes.routing import Routing
from inlay.torch_private import allow_real_tensors, fake_mode_of, is_grouped_product

__all__ = ["EveryToken", "Everywhere"]

# Chunks of experts in a graph: more take less memory and longer to compile.
_MOST_CHUNKS = 16


@dataclass(frozen=True)
class EveryToken:
    """The callable of a node that gives all tokens to each expert, one expert after another.

    It returns the rows, where those of each expert end, and the token that each row is of.
    """

    experts: int
    __name__ = "every_token"

    def __call__(self, source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        count = source.shape[0]
        rows = source.repeat(self.experts, 1)
        numbers = torch.arange(1, self.experts + 1, dtype=torch.int32, device=source.device)
        tokens = torch.arange(count, device=source.device).repeat(self.experts)
        return rows, numbers * count, tokens


class Everywhere:
    """What the ops of experts would compute if every expert was given every token.

    Their values are computed anew, by copies of the ops between the rows that are sent to experts
    and the product that reads the value; what the model computes stays.

    Before:                                  After:
        rows = hidden[order // 2]                rows = hidden[order // 2]
        h = grouped(rows, w1, ends)              all_rows, all_ends, _ = every_token(hidden)
        y = grouped(silu(h), w2, ends)           h = grouped(rows, w1, ends)
                                                 all_h = silu(grouped(all_rows, w1, all_ends))
                                                 y = grouped(silu(h), w2, ends)

    All rows of all experts would take many times the memory of those that the model computes, so
    some experts are given every token at a time.
    """

    def __init__(self, graph: Graph, pass_name: str) -> None:
        self._graph, self._pass_name = graph, pass_name

    def values(
        self, product: Node, value: Node, routing: Routing, experts: int
    ) -> Iterator[tuple[range, Node, Node]]:
        """Yield the inputs of a product, one chunk of experts after another.

        :return: the numbers of the experts, their rows, and where the rows of each end
        """
        selected = _selected(routing)
        if selected is None or routing.source is None:
            raise GraphError(
                f"node {product.name} does not tell which tokens its experts are given, so not all "
                'can be; calibrate without experts="all"'
            )
        for chunk in _chunks(experts, routing):
            with self._graph.inserting_before(product):
                # Made anew for each product: kept for the next one, the rows of all chunks would
                # be in memory at once.
                every = self._call(EveryToken(len(chunk)), (routing.source,), like=product)
                rows, ends, _ = (
                    self._call(operator.getitem, (every, n), like=product) for n in range(3)
                )
                known = {selected: rows, routing.ends: ends}
                given = self._copied(value, known, chunk)
            yield chunk, given, ends

    def _copied(self, node: Node, known: dict[Node, Node], chunk: range) -> Node:
        """Return the node that computes the same for all rows, or itself if rows do not matter."""
        if node not in known:
            inputs = {each: self._copied(each, known, chunk) for each in node.all_input_nodes}
            if all(old is new for old, new in inputs.items()):
                known[node] = node
            elif _fills_rows(node, inputs):
                known[node] = inputs[node.all_input_nodes[0]]
            else:
                if is_grouped_product(node.target):
                    self._narrow_weights(node, inputs, chunk)
                copied = self._graph.node_copy(node, inputs.__getitem__)
                annotate(copied, {})  # it has no slots of its own
                known[node] = self._with_value(copied)
        return known[node]

    def _narrow_weights(self, product: Node, inputs: dict[Node, Node], chunk: range) -> None:
        """Let a product have the weights of some experts alone."""
        weights = product.args[1]
        assert isinstance(weights, Node)
        narrow = (inputs[weights], slice(chunk.start, chunk.stop))
        inputs[weights] = self._call(operator.getitem, narrow, like=product)

    def _call(self, target: Any, args: tuple[Any, ...], like: Node) -> Node:
        made = self._graph.call_function(target, args)
        made.meta["nn_module_stack"] = like.meta.get("nn_module_stack")
        return self._with_value(made)

    def _with_value(self, node: Node) -> Node:
        args, kwargs = map_arg((node.args, node.kwargs), fake_value)
        given = (fake_value(each) for each in node.all_input_nodes)
        mode = fake_mode_of(*chain(*(g if isinstance(g, (tuple, list)) else [g] for g in given)))
        assert mode is not None, "a graph is traced with fake tensors"
        call = getattr(args[0], str(node.target)) if node.op == "call_method" else node.target
        assert callable(call)
        with mode, allow_real_tensors(mode), torch.no_grad():
            rest = args[1:] if node.op == "call_method" else args
            node.meta["example_value"] = call(*rest, **kwargs)
        return stamp(node, self._pass_name)


def _chunks(experts: int, routing: Routing) -> Iterator[range]:
    """Divide experts so that a chunk has as many rows as the model has, but into a few chunks."""
    chosen = routing.tokens.args[1] if routing.tokens is not None else None  # of each token
    size = max(chosen if isinstance(chosen, int) else 1, math.ceil(experts / _MOST_CHUNKS))
    for start in range(0, experts, size):
        yield range(start, min(start + size, experts))


def _fills_rows(node: Node, inputs: Mapping[Node, Node]) -> bool:
    """Tell whether a node fills rows that belong to no expert of this process; here all do."""
    mask = node.args[1] if len(node.args) > 1 else None
    is_fill = tensor_op(node) in ("masked_fill", "masked_fill_")
    return is_fill and isinstance(mask, Node) and inputs[mask] is mask


def _selected(routing: Routing) -> Node | None:
    """The node that takes rows from those of all tokens."""
    if routing.tokens is None:
        return None
    users = (user for user in routing.tokens.users if user.args and user.args[0] is routing.source)
    return next(users, None)
