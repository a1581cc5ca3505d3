"""Find the ops that use a weight or compute attention, in graphs of every tracer."""

import operator
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import GraphModule, Node

from inlay.graph.inputs import tensor_of
from inlay.graph.meta import made_by, stamp
from inlay.recipe.recognition import SWAPS, TRANSPOSES
from inlay.torch_private import (
    HigherOrderOperator,
    OpOverload,
    OpOverloadPacket,
    aten_name,
    is_grouped_product,
)

__all__ = [
    "WeightUse",
    "attention_states",
    "called_path",
    "is_linear",
    "module_path",
    "parameter_reads",
    "replace_value",
    "replace_weight",
    "tensor_op",
    "transposed_by",
    "weight_use",
]

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
    """An op that uses the weight of a Linear or an Embedding, or a stack of weights."""

    kind: str  # of `inlay.model.KINDS`
    value: Node | None  # the activation; an embedding has none
    weight: torch.Tensor | None  # the very tensor, where it is known
    weight_node: Node | None  # None where the op is a call of the module itself
    output: Node  # what the module returns: the op, or the sum of the op and a bias


def weight_use(gm: GraphModule, node: Node) -> WeightUse | None:
    """How a node uses a weight, for graphs of Dynamo, torch.export and symbolic_trace alike."""
    if node.op == "call_module":
        module = gm.get_submodule(str(node.target))
        value = node.args[0] if node.args else node.kwargs.get("input")
        if isinstance(module, nn.Linear) and isinstance(value, Node):
            return WeightUse("linear", value, module.weight, None, node)
        if isinstance(module, nn.Embedding):
            return WeightUse("embedding", None, module.weight, None, node)
        return None
    operands = _operands(node)
    if operands is None:
        return None
    value, weight_node = operands.value(node), operands.weight(node)
    output = node
    if operands.is_product:
        weight_node = transposed_by(weight_node)
        output = _with_bias(gm, node)
    if not isinstance(weight_node, Node):
        return None
    weight = tensor_of(gm, weight_node)
    if operands.kind == "embedding":
        return WeightUse("embedding", None, weight, weight_node, node)
    if not isinstance(value, Node):
        return None
    return WeightUse(operands.kind, value, weight, weight_node, output)


_Place = tuple[int, tuple[str, ...]]  # of an argument: its position, and names it may have


@dataclass(frozen=True)
class _Operands:
    """Where an op takes its activation and its weight."""

    kind: str
    value_at: _Place
    weight_at: _Place
    is_product: bool = False  # it multiplies by the weight as it is given, so by its transpose

    def value(self, node: Node) -> Any:
        return _argument(node, self.value_at)

    def weight(self, node: Node) -> Any:
        return _argument(node, self.weight_at)


def _argument(node: Node, at: _Place) -> Any:
    position, names = at
    if len(node.args) > position:
        return node.args[position]
    return next((node.kwargs[name] for name in names if name in node.kwargs), None)


def _set_argument(node: Node, at: _Place, new: Node) -> None:
    position, names = at
    if len(node.args) > position:
        node.update_arg(position, new)
    else:
        node.update_kwarg(next(name for name in names if name in node.kwargs), new)


_FIRST = ("input", "self")
_OPERANDS = {
    "linear": _Operands("linear", (0, _FIRST), (1, ("weight",))),
    "embedding": _Operands("embedding", (0, _FIRST), (1, ("weight",))),
    "embedding, weight first": _Operands("embedding", (1, ("indices",)), (0, ("weight",))),
    "grouped": _Operands("grouped", (0, _FIRST), (1, ("weight", "mat2")), is_product=True),
    "product": _Operands("linear", (0, _FIRST), (1, ("other", "mat2")), is_product=True),
    "addmm": _Operands("linear", (1, ("mat1",)), (2, ("mat2",)), is_product=True),
}


def is_linear(node: Node) -> bool:
    """Whether the node is a call of `F.linear`."""
    return node.op == "call_function" and node.target in _LINEAR


def _operands(node: Node) -> _Operands | None:
    if is_linear(node):
        return _OPERANDS["linear"]
    if node.op == "call_function":
        if node.target in _EMBEDDING:
            first = node.target in _WEIGHT_FIRST
            return _OPERANDS["embedding, weight first" if first else "embedding"]
        if is_grouped_product(node.target):
            return _OPERANDS["grouped"]
    name = tensor_op(node)
    if name in _PRODUCTS:
        return _OPERANDS["product"]
    return _OPERANDS["addmm"] if name == "addmm" else None


def replace_weight(node: Node, new: Node) -> None:
    """Let an op that uses a weight use another one.

    A product gets a transpose of its own: others may read the one that is there.
    """
    operands = _operands(node)
    assert operands is not None
    given = operands.weight(node)
    if operands.is_product:
        with node.graph.inserting_before(node):
            copied = node.graph.node_copy(given, partial(_swap, transposed_by(given), new))
        new = stamp(copied, made_by(new) or "")
    _set_argument(node, operands.weight_at, new)
    if operands.is_product:
        _erase_unread([given])


def transposed_by(node: Any) -> Node | None:
    """The matrix that a node is the transpose of; None if the node is anything else."""
    if not isinstance(node, Node):
        return None
    name = tensor_op(node)
    if name not in TRANSPOSES and name not in SWAPS and name != "permute":
        return None
    named = [node.kwargs[key] for key in _SOURCE_AND_DIMS if key in node.kwargs]
    given: list[Any] = [*node.args, *named]
    source, *dims = given
    if len(dims) == 1 and isinstance(dims[0], (tuple, list)):
        dims = list(dims[0])
    if not isinstance(source, Node):
        return None
    if name in TRANSPOSES:
        return source
    if len(dims) != 2 or not all(isinstance(dim, int) for dim in dims):
        return None
    first, second = (dim % 2 if -2 <= dim < 2 else None for dim in dims)
    swapped = {first, second} == {0, 1} if name in SWAPS else (first, second) == (1, 0)
    return source if swapped else None


_PRODUCTS = {"matmul", "mm", "linalg_matmul"}
_SOURCE_AND_DIMS = (
    "input", "self", "dim0", "dim1", "axis0", "axis1", "source", "destination", "dims",
)  # fmt: skip


def tensor_op(node: Node) -> str | None:
    """The name of an op on tensors, however it is called: `t` for `x.t()`, `torch.t`, `aten.t`."""
    target = node.target
    if node.op == "call_method":
        return _SPELLED.get(str(target), str(target))
    if node.op != "call_function":
        return None
    if target is getattr:
        return str(node.args[1])
    if isinstance(target, (OpOverload, OpOverloadPacket)):
        name = aten_name(target)
        return None if name is None else _SPELLED.get(name, name)
    name = getattr(target, "__name__", "")
    # A function of the user's own may have the name of one of torch.
    known = (getattr(owner, name, None) for owner in (torch, torch.Tensor, operator))
    if any(target is function for function in known) or target is torch.linalg.matmul:
        return _SPELLED.get(name, name)
    return None


_SPELLED = {
    "__matmul__": "matmul", "imatmul": "matmul",
    # What `.T` and `.H` are in exported graphs, and in those of Dynamo from torch 2.15 on.
    "numpy_T": "T", "matrix_H": "H",
}  # fmt: skip


def _with_bias(gm: GraphModule, product: Node) -> Node:
    """The sum of a product and a bias, which is what the module returns; else the product."""
    user = next(iter(product.users), None)
    if user is None or len(product.users) > 1 or tensor_op(user) not in ("add", "iadd", "add_"):
        return product
    if module_path(user) != module_path(product) or user.kwargs.get("alpha", 1) != 1:
        return product
    addend = next((n for n in user.all_input_nodes if n is not product), None)
    bias = tensor_of(gm, addend)
    is_bias = isinstance(bias, nn.Parameter) and bias.ndim == 1
    return user if is_bias else product


def attention_states(node: Node) -> dict[str, Node] | None:
    """Query, key and value of an attention op, keys and values before they are repeated."""
    if node.op != "call_function" or not _is_attention(node.target):
        return None
    states = {name: _argument(node, at) for name, at in _STATES.items()}
    if not all(isinstance(value, Node) for value in states.values()):
        return None
    return {name: value if name == "q" else _before_repeat(value) for name, value in states.items()}


_STATES: dict[str, _Place] = {"q": (0, ("query",)), "k": (1, ("key",)), "v": (2, ("value",))}


def replace_value(node: Node, base_name: str, old: Node, new: Node) -> None:
    """Let an op read another value as its input, or as its query, key or value.

    Heads that are repeated on the way are repeated anew: others may read the old ones.
    """
    at = _STATES.get(base_name)
    if at is None:
        operands = _operands(node)
        assert operands is not None
        at = operands.value_at
    operand = _argument(node, at)
    views: list[Node] = []
    while operand is not old:
        views.append(operand)
        operand = operand.args[0]
    for view in reversed(views):
        source = view.args[0]
        with node.graph.inserting_before(node):
            copied = node.graph.node_copy(view, partial(_swap, source, new))
        new = stamp(copied, made_by(new) or "")
    _set_argument(node, at, new)
    _erase_unread(views)


def _swap(old: Any, new: Node, node: Node) -> Node:
    return new if node is old else node


def _erase_unread(views: list[Node]) -> None:
    for view in views:
        if not view.users:
            view.graph.erase_node(view)


def _is_attention(target: Any) -> bool:
    # The op of flex attention has no other public name.
    is_flex = isinstance(target, HigherOrderOperator) and target.__name__ == "flex_attention"
    return is_flex or target in _ATTENTION


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


def called_path(node: Node) -> str | None:
    """The path of the module that an op is, or was traced in."""
    return str(node.target) if node.op == "call_module" else module_path(node)


def parameter_reads(gm: GraphModule) -> Iterator[tuple[str, Node | torch.Tensor]]:
    """Yield the values that ops read, or the parameters of the modules that they call, with paths.

    An input or attribute of the graph may be a parameter.
    """
    for node in gm.graph.nodes:
        path = called_path(node)
        if not path:
            continue
        if node.op == "call_module":
            own = gm.get_submodule(str(node.target)).parameters(recurse=False)
            yield from ((path, parameter) for parameter in own)
        elif node.op not in ("placeholder", "get_attr", "output"):
            for value in node.all_input_nodes:
                if value.op in ("placeholder", "get_attr"):
                    yield path, value
