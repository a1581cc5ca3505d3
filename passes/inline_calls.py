"""Open calls of graphs that run exactly once."""

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import Argument

from inlay.errors import GraphError
from inlay.graph import (
    Pass,
    PassResult,
    attention_states,
    bodies_of,
    copy,
    stamp,
    weight_use,
)
from inlay.torch_private import HigherOrderOperator, set_autocast, set_grad_enabled

__all__ = ["InlineCalls"]

# How many arguments stand before the body, and how many between the body and its operands.
_CALLS = {
    "invoke_subgraph": (0, 1),
    "tag_activation_checkpoint": (0, 0),
    "wrap": (0, 0),
    "wrap_activation_checkpoint": (0, 0),
}
_MODE_CALLS = {
    "wrap_with_set_grad_enabled": (1, 0),
    "wrap_with_autocast": (4, 0),
}


@dataclass(frozen=True, kw_only=True)
class InlineCalls(Pass):
    """Put the ops of a graph that is called once, with its operands as they are, where the call is.

    Before:                                        After:
        x, w                                           x, w
        call = invoke_subgraph(body, 'body', x, w)     y = linear(x, w)
        y = getitem(call, 0)                           z = relu(y)
        return y                                       return z

        body(x, w):
            y = linear(x, w)
            z = relu(y)
            return (z,)

    Inlined ops can be observed like all others. These calls are graphs that are compiled on their
    own and activation checkpoints, which matter to gradients alone. A call that sets autocast or
    gradients is opened only where something in it can be quantized, and what it sets is then set
    and reset by ops of its own. Branches, loops and scans stay: they do not run once.
    """

    def call(self, gm: GraphModule) -> PassResult:
        gm = copy(gm)
        modified = False
        while calls := _calls(gm):
            sites = _first_sites(calls)
            for node in calls:
                self._inline(gm, node, sites)
            modified = True
        gm.recompile()
        return PassResult(gm, modified)

    def ensures(self, gm: GraphModule) -> None:
        left = [node.name for node in _calls(gm)]
        if left:
            raise GraphError(f"these calls are not inlined: {', '.join(left)}")

    def _inline(self, gm: GraphModule, node: Node, sites: Mapping[GraphModule, Any]) -> None:
        before, between = (_CALLS | _MODE_CALLS)[_name(node)]
        ((holder, body),) = bodies_of(node).items()
        operands = node.args[before + 1 + between :]
        inputs = list(body.graph.find_nodes(op="placeholder"))
        values: dict[Node, Argument] = dict(zip(inputs, operands, strict=True))
        with gm.graph.inserting_before(node):
            reset = self._set_modes(gm.graph, node)
            for inner in body.graph.nodes:
                if inner.op in ("placeholder", "output"):
                    continue
                copied = gm.graph.node_copy(inner, lambda n: values[n])
                if inner.op in ("get_attr", "call_module"):
                    copied.target = _adopt(gm, holder, body, str(inner.target))
                copied.meta["nn_module_stack"] = _moved(inner, sites[body], node)
                values[inner] = stamp(copied, self.name)
            for target, args in reset:
                stamp(gm.graph.call_function(target, args), self.name)
        (output,) = body.graph.find_nodes(op="output")
        _replace(gm.graph, node, output.args[0], values)
        gm.graph.erase_node(node)
        if not holder.users:
            gm.graph.erase_node(holder)

    def _set_modes(self, graph: Graph, node: Node) -> list[tuple[Any, tuple[Any, ...]]]:
        """Enter the context of a call. Return a function that leaves it."""
        if _name(node) == "wrap_with_autocast":
            enter, leave = set_autocast()
            entered = stamp(graph.call_function(enter, node.args[:4]), self.name)
            return [(leave, (entered,))]
        if _name(node) == "wrap_with_set_grad_enabled":
            earlier = stamp(graph.call_function(torch.is_grad_enabled), self.name)
            stamp(graph.call_function(set_grad_enabled(), node.args[:1]), self.name)
            return [(set_grad_enabled(), (earlier,))]
        return []


def _name(node: Node) -> str:
    return str(getattr(node.target, "__name__", ""))


def _calls(gm: GraphModule) -> list[Node]:
    """Calls that can be opened."""
    found = []
    for node in gm.graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, HigherOrderOperator):
            continue
        bodies = list(bodies_of(node).values())
        if len(bodies) != 1 or not _results_are_read_one_by_one(node, bodies[0]):
            continue
        if _name(node) in _CALLS or (_name(node) in _MODE_CALLS and _can_be_quantized(bodies[0])):
            found.append(node)
    return found


def _results_are_read_one_by_one(node: Node, body: GraphModule) -> bool:
    (output,) = body.graph.find_nodes(op="output")
    return isinstance(output.args[0], Node) or all(
        user.target is operator.getitem and isinstance(user.args[1], int) for user in node.users
    )


def _can_be_quantized(body: GraphModule) -> bool:
    """Whether there is an op inside, at any depth, that a recipe may ask to observe."""
    return any(
        weight_use(body, node) is not None
        or attention_states(node) is not None
        or any(map(_can_be_quantized, bodies_of(node).values()))
        for node in body.graph.nodes
    )


def _adopt(gm: GraphModule, holder: Node, body: GraphModule, target: str) -> str:
    """Give the graph an attribute of a body, under a name of its own. Return that name."""
    value = operator.attrgetter(target)(body)
    name = f"{holder.target}_{target}".replace(".", "_")
    while hasattr(gm, name) and getattr(gm, name) is not value:
        name += "_"
    if not hasattr(gm, name):
        if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter):
            gm.register_buffer(name, value)
        else:
            setattr(gm, name, value)
    return name


def _first_sites(calls: list[Node]) -> dict[GraphModule, Any]:
    """For each body, the modules around its first call: it was traced there."""
    sites: dict[GraphModule, Any] = {}
    for node in calls:
        (body,) = bodies_of(node).values()
        sites.setdefault(body, _stack(node))
    return sites


def _stack(node: Node) -> list[tuple[str, Any]]:
    return list((node.meta.get("nn_module_stack") or {}).items())


def _moved(inner: Node, traced_in: list[tuple[str, Any]], call: Node) -> dict[str, Any]:
    """The modules around an inlined op: those around its call, then those inside the body.

    A body is traced once and called for many modules, so the names inside are those of the first.
    """
    around, inside = _stack(call), _stack(inner)
    if inside[: len(traced_in)] != traced_in or not around or around == traced_in:
        return dict(inside or around)
    old, new = traced_in[-1][1][0], around[-1][1][0]
    renamed = [
        (f"{key}@{new}", (f"{new}{path.removeprefix(old)}" if path.startswith(old) else path, kind))
        for key, (path, kind) in inside[len(traced_in) :]
    ]
    return dict([*around, *renamed])


def _replace(graph: Graph, node: Node, results: Any, values: Mapping[Node, Argument]) -> None:
    """Let readers of a call read what its body computed."""
    if isinstance(results, Node):
        _let_read(node, values[results])
        return
    for user in list(node.users):
        result = results[user.args[1]]
        _let_read(user, values[result] if isinstance(result, Node) else result)
        graph.erase_node(user)


def _let_read(old: Node, new: Argument) -> None:
    if isinstance(new, Node):
        old.replace_all_uses_with(new)
        return
    for user in list(old.users):  # a constant
        user.args = torch.fx.node.map_arg(user.args, lambda n: new if n is old else n)
        user.kwargs = torch.fx.node.map_arg(user.kwargs, lambda n: new if n is old else n)
