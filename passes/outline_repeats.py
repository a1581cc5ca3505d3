"""Cut blocks or observers out of the graph, and give identical ones one body."""

import operator
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from inlay.graph import (
    Pass,
    PassResult,
    bodies_of,
    body_held_by,
    copy,
    fake_value,
    made_by,
    module_path,
    stamp,
    switches_modes,
    transformed_nodes,
)
from inlay.nodes.call_body import CallBody
from inlay.nodes.observe import Observe
from inlay.torch_private import adopt_calling_convention, new_graph_like

__all__ = ["OutlineObservers", "OutlineRepeats"]

_BY_NAME = ("call_module", "get_attr")  # ops whose target is a module of the graph
_BLOCK = re.compile(r"(?:^|.*?\.)\d+(?=\.|$)")


@dataclass(frozen=True, kw_only=True)
class OutlineRepeats(Pass):
    """Make every block of the model a call, and of identical blocks the same call.

    Before:                           After:
        x, w0, w1                         x, w0, w1
        a = linear(x, w0)  # layers.0     a = outlined_0(x, w0)
        b = relu(a)        # layers.0     b = outlined_0(a, w1)
        c = linear(b, w1)  # layers.1     return b
        d = relu(c)        # layers.1
        return d

    A block is a module with a number for a name, such as `layers.3`. The cut is made where the
    number changes, so the pieces keep the order of the graph whatever it is. Pieces are identical
    if they do the same to values of the same shapes; weights, states and scales are their inputs.
    The graphs that an op runs, such as the branches of `cond`, go with the op, and pieces are
    identical only if these are too. What runs under `vmap` is not cut. A graph that switches
    autocast or gradients on the way is left whole, because a piece compiled alone would not know.
    """

    def pieces(self, gm: GraphModule) -> list[list[Node]]:
        """Find the nodes that become calls, in the order of the graph."""
        found = _cut(gm)
        return [piece for piece in found if not _is_call(piece[0])] if len(found) > 1 else []

    def call(self, gm: GraphModule) -> PassResult:
        pieces = self.pieces(gm)
        if not pieces or any(made_by(n) == self.name or switches_modes(n) for n in gm.graph.nodes):
            return PassResult(copy(gm), False)
        names: dict[Any, str] = {}
        bodies: dict[str, GraphModule] = {}
        outer = new_graph_like(gm.graph)
        values: dict[Node, Node] = {}
        last = {piece[-1]: piece for piece in pieces}
        inside = {node for piece in pieces for node in piece}
        held = {holder for node in inside for holder in bodies_of(node)}
        for node in gm.graph.nodes:
            if node.op != "output" and node not in inside and node not in held:
                values[node] = outer.node_copy(node, lambda node: values[node])
            if node not in last:
                continue
            piece = last[node]
            inputs, outputs = _interface(piece)
            key = _structure(piece, inputs, outputs)
            name = names.setdefault(key, f"outlined_{len(names)}")
            if name not in bodies:
                bodies[name] = _body(gm, piece, inputs, outputs)
            call = stamp(outer.call_module(name, tuple(values[n] for n in inputs)), self.name)
            for index, result in enumerate(outputs):
                values[result] = stamp(outer.call_function(_getitem, (call, index)), self.name)
                values[result].meta["example_value"] = fake_value(result)
        (output,) = gm.graph.find_nodes(op="output")
        outer.node_copy(output, lambda node: values[node])
        adopt_calling_convention(outer, gm.graph)
        outlined = GraphModule({**_attributes(gm, outer), **bodies}, outer, type(gm).__name__)
        outlined.train(gm.training)
        return PassResult(outlined, True)


@dataclass(frozen=True, kw_only=True)
class OutlineObservers(OutlineRepeats):
    """Make every observe node a call, and of identical ones the same call.

    Before:                              After:
        observe(x, q_input_seen, ...)        outlined_0(x, q_input_seen, ...)
        y = linear(x, w)                     y = linear(x, w)
        observe(y, o_input_seen, ...)        outlined_0(y, o_input_seen, ...)
        z = linear(y, v)                     z = linear(y, v)
        return z                             return z

    The observers can then be compiled while the rest runs op by op. Observe nodes are identical if
    they follow the same rule for values of the same shape. An opaque one stays where it is.

    :param observers: names of the observers to cut out
    """

    observers: frozenset[str]

    def pieces(self, gm: GraphModule) -> list[list[Node]]:
        return [[node] for node in gm.graph.nodes if self._is_cut_out(node)]

    def _is_cut_out(self, node: Node) -> bool:
        target = node.target
        return (
            isinstance(target, Observe)
            and not target.is_opaque
            and target.rule.name in self.observers
        )


def _getitem(values: tuple[Any, ...], index: int) -> Any:
    return values[index]


def _cut(gm: GraphModule) -> list[list[Node]]:
    """Runs of nodes of the same block, in the order of the graph."""
    pieces: list[list[Node]] = []
    current: str | None = None
    opened: Node | None = None
    transformed = transformed_nodes(gm.graph.nodes)
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        if _is_call(node):
            if not pieces or not _is_call(pieces[-1][0]):
                pieces.append([])
            pieces[-1].append(node)
            current = None
            continue
        if pieces and opened is not None and node in transformed:
            pieces[-1].append(node)
            continue
        opened = transformed.get(node)
        path = module_path(node)
        # An op without a module belongs where it stands.
        found = _BLOCK.match(path) if path is not None else None
        block = current if path is None else found.group() if found else ""
        if block != current or not pieces or _is_call(pieces[-1][0]):
            pieces.append([])
            current = block
        pieces[-1].append(node)
    return pieces


def _is_call(node: Node) -> bool:
    """Whether a node calls a body already, or takes one of its results."""
    if node.target is operator.getitem and isinstance(node.args[0], Node):
        node = node.args[0]
    return isinstance(node.target, CallBody)


def _interface(piece: list[Node]) -> tuple[list[Node], list[Node]]:
    inside = set(piece)
    bodies = {holder for node in piece for holder in bodies_of(node)}
    inputs = dict.fromkeys(
        n for node in piece for n in node.all_input_nodes if n not in inside and n not in bodies
    )
    outputs = [node for node in piece if any(user not in inside for user in node.users)]
    return list(inputs), outputs


def _body(
    gm: GraphModule, piece: list[Node], inputs: list[Node], outputs: list[Node]
) -> GraphModule:
    graph = new_graph_like(gm.graph)
    values: dict[Node, Node] = {}
    for node in inputs:
        values[node] = graph.placeholder(node.name)
        values[node].meta = {
            key: value for key, value in node.meta.items() if key != "grapharg"
        } | {"example_value": _input_value(gm, node)}
    bodies = {holder for node in piece for holder in bodies_of(node)}
    for node in piece:
        for holder in bodies_of(node):
            if holder not in values:
                values[holder] = graph.node_copy(holder)
        values[node] = graph.node_copy(node, lambda n: values[n])
    graph.output(tuple(values[node] for node in outputs))
    called = {str(node.target) for node in (*piece, *bodies) if node.op in _BY_NAME}
    body = GraphModule({name: gm.get_submodule(name) for name in called}, graph, "Body")
    body.train(gm.training)
    return body


def _input_value(gm: GraphModule, node: Node) -> Any:
    value = fake_value(node)
    if value is None and node.op == "get_attr":
        value = _attribute(gm, str(node.target))
    return value


def _attribute(module: torch.nn.Module, target: str) -> Any:
    value: Any = module
    for name in target.split("."):
        value = getattr(value, name)
    return value


def _attributes(gm: GraphModule, outer: Graph) -> dict[str, Any]:
    """What the nodes that stay refer to by name."""
    return {
        str(node.target): _attribute(gm, str(node.target))
        for node in outer.nodes
        if node.op in _BY_NAME and hasattr(gm, str(node.target).partition(".")[0])
    }


def _structure(piece: list[Node], inputs: list[Node], outputs: list[Node]) -> Any:
    """Everything a compiled piece depends on, with nodes numbered instead of named."""
    number = {node: index for index, node in enumerate([*inputs, *piece])}

    def numbered(value: Any) -> Any:
        if isinstance(value, Node):
            if value in number:
                return ("node", number[value])
            body = body_held_by(value)
            return ("body", _whole(body)) if body is not None else _attribute_of(value)
        if isinstance(value, (list, tuple)):
            return (type(value).__name__, *map(numbered, value))
        if isinstance(value, dict):
            return tuple((key, numbered(item)) for key, item in value.items())
        if isinstance(value, slice):
            return ("slice", numbered(value.start), numbered(value.stop), numbered(value.step))
        return (type(value).__name__, value if _is_hashable(value) else id(value))

    ops = tuple(
        (node.op, node.target, numbered(node.args), numbered(node.kwargs)) for node in piece
    )
    return ops, tuple(_signature(fake_value(node)) for node in inputs), numbered(outputs)


def _whole(body: GraphModule) -> Any:
    """The structure of a graph that an op runs."""
    nodes = list(body.graph.nodes)
    inputs = [node for node in nodes if node.op == "placeholder"]
    # An attribute means what it holds, which may differ between graphs that name it alike.
    rest = [node for node in nodes if node.op not in ("placeholder", "get_attr")]
    return _structure(rest, inputs, [])


def _attribute_of(node: Node) -> Any:
    assert node.graph.owning_module is not None
    return ("attribute", id(_attribute(node.graph.owning_module, str(node.target))))


def _signature(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return (type(value).__name__, str(value))
    return (
        str(value.dtype),
        str(value.device),
        str(tuple(value.shape)),
        str(value.stride()) if value.layout == torch.strided else "",
        value.requires_grad,
        isinstance(value, torch.nn.Parameter),
    )


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True
