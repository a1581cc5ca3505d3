"""Send every token through every expert, beside the routing of the model, to calibrate."""

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from inlay.errors import GraphError
from inlay.graph import annotate, fake_value, stamp, tensor_op
from inlay.nodes.routing import Routing
from inlay.torch_private import allow_real_tensors, fake_mode_of

__all__ = ["EveryToken", "Everywhere"]


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
    """

    def __init__(self, graph: Graph, pass_name: str) -> None:
        self._graph, self._pass_name = graph, pass_name
        self._instead: dict[Node, dict[Node, Node]] = {}  # by the node that has the ends

    def value(
        self, product: Node, value: Node, routing: Routing, experts: int
    ) -> tuple[Node, Node]:
        """Return what a product would be given, and where the rows of each expert end."""
        selected = _selected(routing)
        if selected is None or routing.source is None:
            raise GraphError(
                f"node {product.name} does not tell which tokens its experts are given, so not all "
                'can be; calibrate without experts="all"'
            )
        with self._graph.inserting_before(product):
            if routing.ends not in self._instead:
                every = self._call(EveryToken(experts), (routing.source,), like=product)
                rows, ends, _ = (
                    self._call(operator.getitem, (every, n), like=product) for n in range(3)
                )
                self._instead[routing.ends] = {selected: rows, routing.ends: ends}
            known = self._instead[routing.ends]
            return self._copied(value, known), known[routing.ends]

    def _copied(self, node: Node, known: dict[Node, Node]) -> Node:
        """Return the node that computes the same for all rows, or itself if rows do not matter."""
        if node not in known:
            inputs = {each: self._copied(each, known) for each in node.all_input_nodes}
            if all(old is new for old, new in inputs.items()):
                known[node] = node
            elif _fills_rows(node, inputs):
                known[node] = inputs[node.all_input_nodes[0]]
            else:
                copied = self._graph.node_copy(node, inputs.__getitem__)
                annotate(copied, {})  # it has no slots of its own
                known[node] = self._with_value(copied)
        return known[node]

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
