"""Find the ops that use a weight or compute attention, in graphs of every tracer."""

import operator
import re
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import GraphModule, Node

from inlay.graph.inputs import tensor_of

__all__ = ["WeightUse", "attention_states", "module_path", "replace_weight", "weight_use"]

_LINEAR = {F.linear, torch.ops.aten.linear.default}
_EMBEDDING = {F.embedding, torch.embedding, torch.ops.aten.embedding.default}
_WEIGHT_FIRST = {torch.embedding, torch.ops.aten.embedding.default}
_ATTENTION = {
    F.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention.default,
}
_VARIABLE = re.compile(r"^[LG]\['[^']*'\]\.?")
_WIDENING = {
    operator.getitem,
    torch.ops.aten.slice.Tensor,
    torch.ops.aten.unsqueeze.default,
}


@dataclass(frozen=True)
class WeightUse:
    """An op that uses the weight of a Linear or an Embedding."""

    kind: str
    value: Node | None  # the activation; an embedding has none
    weight: torch.Tensor | None  # the very tensor, where it is known
    weight_node: Node | None  # None where the op is a call of the module itself


def weight_use(gm: GraphModule, node: Node) -> WeightUse | None:
    """How a node uses a weight, for graphs of Dynamo, torch.export and symbolic_trace alike."""
    if node.op == "call_module":
        module = gm.get_submodule(str(node.target))
        value = node.args[0] if node.args else node.kwargs.get("input")
        if isinstance(module, nn.Linear) and isinstance(value, Node):
            return WeightUse("linear", value, module.weight, None)
        if isinstance(module, nn.Embedding):
            return WeightUse("embedding", None, module.weight, None)
        return None
    if node.op != "call_function":
        return None
    kind = (
        "linear" if node.target in _LINEAR else "embedding" if node.target in _EMBEDDING else None
    )
    if kind is None:
        return None
    value, weight_node = _operands(node)
    if not isinstance(weight_node, Node) or (kind == "linear" and not isinstance(value, Node)):
        return None
    weight = tensor_of(gm, weight_node)
    return WeightUse(kind, value if kind == "linear" else None, weight, weight_node)


def _operands(node: Node) -> tuple[Any, Any]:
    """Value and weight of a linear or embedding op, given by position or by name."""
    position = 0 if node.target in _WEIGHT_FIRST else 1
    weight = node.args[position] if len(node.args) > position else node.kwargs.get("weight")
    other = 1 - position
    value = node.args[other] if len(node.args) > other else node.kwargs.get("input")
    return value, weight


def replace_weight(node: Node, new: Node) -> None:
    """Let a linear or embedding op use another weight."""
    position = 0 if node.target in _WEIGHT_FIRST else 1
    if len(node.args) > position:
        node.update_arg(position, new)
    else:
        node.update_kwarg("weight", new)


def attention_states(node: Node) -> dict[str, Node] | None:
    """Query, key and value of an attention op, keys and values before they are repeated."""
    if node.op != "call_function" or node.target not in _ATTENTION:
        return None
    names = ("query", "key", "value")
    given = [*node.args[:3], *(node.kwargs.get(name) for name in names[len(node.args) :])]
    if not all(isinstance(value, Node) for value in given):
        return None
    query, key, value = (operand for operand in given if isinstance(operand, Node))
    return {"q": query, "k": _before_repeat(key), "v": _before_repeat(value)}


def _before_repeat(node: Node) -> Node:
    """Heads that are shared by groups of queries are repeated by an expand and a reshape."""
    expand = node.args[0] if node.target in ("reshape", torch.ops.aten.reshape.default) else None
    if not isinstance(expand, Node):
        return node
    if expand.target not in ("expand", torch.ops.aten.expand.default):
        return node
    widened = expand.args[0]
    while isinstance(widened, Node) and widened.target in _WIDENING:
        widened = widened.args[0]
    return widened if isinstance(widened, Node) and widened is not expand.args[0] else node


def module_path(node: Node) -> str | None:
    """The name of the module an op was traced in, from the root of the trace."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return None
    # Dynamo starts the path with the variable that holds the root, such as L['self'].
    return _VARIABLE.sub("", str(list(stack.values())[-1][0]))
