"""Read ops as equalization sees them: their parameters, and what commutes with a scale."""

from collections.abc import Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import GraphModule, Node

from inlay.graph import Source, fake_value, mutates, slots_of, tensor_op, weight_use
from inlay.model import PRODUCTS
from inlay.nodes.routing import routing_of

__all__ = [
    "ATTENTION",
    "COMMUTING",
    "Refusal",
    "bias_node",
    "commutes",
    "is_about_shapes",
    "is_tensor",
    "norm_of",
    "objection",
    "op_name",
    "parameters_of",
    "quantizes_linear",
    "shifted_parameter",
    "source_of",
    "stacked_in",
    "times_read",
    "weight_source",
]


class Refusal(Exception):  # noqa: N818  it is an answer, not an error
    """A value cannot be equalized; says why."""


COMMUTING = {
    "relu", "leaky_relu", "abs", "neg", "dropout", "to", "float", "double", "half", "bfloat16",
    "type_as", "contiguous", "clone", "detach", "alias", "_to_copy",
}  # fmt: skip
ATTENTION = {
    F.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention.default,
}
_LAYER_NORMS = {F.layer_norm, torch.layer_norm, torch.ops.aten.layer_norm.default}
_RMS_NORMS = {F.rms_norm, torch.rms_norm, torch.ops.aten.rms_norm.default}
_FUNCTIONS = {F.relu: "relu", F.leaky_relu: "leaky_relu", F.dropout: "dropout"}


def op_name(node: Node) -> str:
    if node.op == "call_function" and node.target in _FUNCTIONS:
        return _FUNCTIONS[node.target]
    if node.op == "call_module":
        assert node.graph.owning_module is not None
        module = node.graph.owning_module.get_submodule(str(node.target))
        return _MODULES.get(type(module), type(module).__name__)
    return tensor_op(node) or str(getattr(node.target, "__name__", node.target))


_MODULES = {
    nn.ReLU: "relu", nn.LeakyReLU: "leaky_relu", nn.Dropout: "dropout", nn.Identity: "alias",
}  # fmt: skip


def commutes(node: Node) -> bool:
    """Whether an op on one value may come before or after a scale for each channel."""
    if op_name(node) == "masked_fill":
        return node.args[2:] == (0,)  # rows that are left out stay zero
    return op_name(node) in COMMUTING


def stacked_in(gm: GraphModule, readers: Collection[Node], makers: Collection[Node]) -> int:
    """Return how many matrices have scales of their own; 0 if nobody reads or makes with stacks.

    :raises Refusal: if readers and makers do not divide the rows of the value in the same way
    """
    uses = {node: weight_use(gm, node) for node in (*readers, *makers)}
    of_stacks = [use for use in uses.values() if use is not None and use.kind == "grouped"]
    if not of_stacks:
        return 0
    ends = {None if (routing := routing_of(node)) is None else routing.ends for node in uses}
    if len(of_stacks) < len(uses) or len(ends) > 1:
        raise Refusal("its rows are not divided among the same matrices everywhere")
    weights = of_stacks[0].weight_node
    assert weights is not None
    return len(fake_value(weights))


def source_of(node: Any) -> Source:
    if isinstance(node, Node) and node.op in ("placeholder", "get_attr"):
        return Source(str(node.name if node.op == "placeholder" else node.target), _is_input(node))
    raise Refusal("it is computed with a weight that is no parameter")


def _is_input(node: Node) -> bool:
    return node.op == "placeholder"


def weight_source(gm: GraphModule, node: Node) -> Source:
    return parameters_of(gm, node)[0]


def parameters_of(gm: GraphModule, node: Node) -> tuple[Source, Source | None]:
    """Return weight and bias of a linear op."""
    if node.op == "call_module":
        has_bias = getattr(gm.get_submodule(str(node.target)), "bias", None) is not None
        bias = Source(f"{node.target}.bias", False) if has_bias else None
        return Source(f"{node.target}.weight", False), bias
    use = weight_use(gm, node)
    assert use is not None
    given = None if use.kind == "grouped" else bias_node(node)
    return source_of(use.weight_node), None if given is None else source_of(given)


def quantizes_linear(gm: GraphModule, node: Node) -> bool:
    """Whether an op multiplies by a weight, and its input or weight is quantized."""
    use = weight_use(gm, node)
    is_linear = use is not None and use.kind in PRODUCTS and use.value is not None
    return is_linear and not slots_of(node).keys().isdisjoint(("input", "weight"))


def bias_node(node: Node) -> Any:
    if tensor_op(node) == "addmm":
        return node.args[0] if node.args else node.kwargs.get("input")
    return node.args[2] if len(node.args) > 2 else node.kwargs.get("bias")


def norm_of(gm: GraphModule, node: Node) -> tuple[tuple[Any, ...], Any, Any] | None:
    """Return shape, weight and bias of a norm; None for every other op."""
    if node.op == "call_module":
        module = gm.get_submodule(str(node.target))
        if not isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
            return None
        found = [
            None if getattr(module, name, None) is None else Source(f"{node.target}.{name}", False)
            for name in ("weight", "bias")
        ]
        return tuple(module.normalized_shape), found[0], found[1]
    if node.op != "call_function" or node.target not in _LAYER_NORMS | _RMS_NORMS:
        return None
    names = ("input", "normalized_shape", "weight", "bias")
    given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    bias = None if node.target in _RMS_NORMS else given.get("bias")
    shape = given["normalized_shape"]
    return tuple(shape) if isinstance(shape, (tuple, list)) else (), given.get("weight"), bias


def shifted_parameter(node: Node) -> tuple[Node, float, Node | None] | None:
    """Return the parameter that a node is, cast or with a number added, the number and its user."""
    offset, user = 0.0, None
    while node.op not in ("placeholder", "get_attr"):
        if len(node.users) != 1 or mutates(node):
            return None
        name = op_name(node)
        numbers = [value for value in node.args[:2] if isinstance(value, (int, float))]
        if name == "add" and len(numbers) == 1 and not offset:
            offset = float(numbers[0])
        elif name not in ("to", "float", "double", "type_as", "_to_copy", "alias"):
            return None
        sources = [value for value in node.args[:2] if isinstance(value, Node)]
        if not sources or not is_tensor(sources[0]):
            return None
        node, user = sources[0], node
    return (node, offset, user) if is_tensor(node) else None


def is_tensor(node: Node) -> bool:
    return isinstance(fake_value(node), torch.Tensor)


def is_about_shapes(user: Node) -> bool:
    return op_name(user) in ("size", "shape", "dim", "ndim", "_assert_tensor_metadata")


def times_read(node: Node, user: Node) -> int:
    if op_name(user) == "type_as":
        return int(user.args[0] is node)
    found: list[Node] = []
    torch.fx.node.map_arg((user.args, user.kwargs), found.append)
    return found.count(node)


def objection(gm: GraphModule, user: Node) -> str:
    use = weight_use(gm, user)
    if user.op == "output":
        return "the graph returns it"
    if use is not None:
        return "a Linear that is not quantized reads it too"
    return f"{op_name(user)} reads it too"
