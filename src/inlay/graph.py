"""Helpers for FX graphs: reading what an op uses, adding inputs, keeping track of who made what."""

import copy as _copy
import operator
import re
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from inlay.errors import GraphError

__all__ = [
    "SlotInput",
    "WeightUse",
    "add_input",
    "attention_states",
    "bind",
    "constants_allowed",
    "copy",
    "fake_mode",
    "fake_value",
    "inputs_of",
    "label_inputs",
    "made_by",
    "module_path",
    "mutates",
    "propagate_shapes",
    "replace_weight",
    "require_nodes",
    "slot_input",
    "slot_inputs",
    "stamp",
    "tensor_of",
    "weight_use",
]

_MADE_BY = "inlay_made_by"
_INPUT = "inlay_input"
_TENSOR = "inlay_tensor"

_LINEAR = {F.linear, torch._C._nn.linear, torch.ops.aten.linear.default}
_EMBEDDING = {F.embedding, torch.embedding, torch.ops.aten.embedding.default}
_WEIGHT_FIRST = {torch.embedding, torch.ops.aten.embedding.default}
_ATTENTION = {
    F.scaled_dot_product_attention,
    torch._C._nn.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention.default,
}


def copy(gm: GraphModule) -> GraphModule:
    """A graph module with a graph of its own over the same parameters and submodules.

    What the original says about where it comes from is left behind: AOTAutograd holds a graph that
    claims to be Dynamo's to rules that a rewritten one cannot keep.
    """
    # A deep copy of a graph copies its nodes; what they refer to stays the same.
    copied = GraphModule(gm, _copy.deepcopy(gm.graph), class_name=type(gm).__name__)
    copied.train(gm.training)
    return copied


def stamp(node: Node, pass_name: str) -> Node:
    """Write down which pass made the node."""
    node.meta[_MADE_BY] = pass_name
    return node


def made_by(node: Node) -> str | None:
    """The name of the pass that made the node; None if it was traced."""
    name = node.meta.get(_MADE_BY)
    return name if isinstance(name, str) else None


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


def tensor_of(gm: GraphModule, node: Any) -> torch.Tensor | None:
    """The very tensor behind an input of the graph or an attribute of the module."""
    if not isinstance(node, Node):
        return None
    if node.op == "get_attr":
        value = operator.attrgetter(str(node.target))(gm)
        return value if isinstance(value, torch.Tensor) else None
    if node.op == "placeholder":
        if _TENSOR in node.meta:
            return node.meta[_TENSOR]()  # type: ignore[no-any-return]
        arg = node.meta.get("grapharg")
        value = None if arg is None else arg.example
        return value if isinstance(value, torch.Tensor) else None
    return None


def label_inputs(gm: GraphModule, inputs: Iterable[Any]) -> GraphModule:
    """A copy whose inputs know the very tensors they are called with."""
    gm = copy(gm)
    for node, value in zip(inputs_of(gm.graph), inputs, strict=True):
        if isinstance(value, torch.Tensor):
            node.meta[_TENSOR] = weakref.ref(value)
    return gm


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


_VARIABLE = re.compile(r"^[LG]\['[^']*'\]\.?")
_WIDENING = {
    operator.getitem,
    torch.ops.aten.slice.Tensor,
    torch.ops.aten.unsqueeze.default,
}


def module_path(node: Node) -> str | None:
    """The name of the module an op was traced in, from the root of the trace."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return None
    # Dynamo starts the path with the variable that holds the root, such as L['self'].
    return _VARIABLE.sub("", str(list(stack.values())[-1][0]))


def fake_value(node: Node) -> Any:
    """The value of a node without its data, as tracing left it."""
    return node.meta.get("example_value", node.meta.get("val"))


def fake_mode(*values: Any) -> FakeTensorMode | None:
    """The mode of the values themselves. Dynamo has another one by the time it calls a backend."""
    for value in values:
        if isinstance(value, FakeTensor):
            return value.fake_mode
    return None


@contextmanager
def constants_allowed(mode: FakeTensorMode | None) -> Iterator[None]:
    """Let tensors with data take part in tracing: compressed-tensors keeps its ranges in some."""
    if mode is None:
        yield
        return
    before, mode.allow_non_fake_inputs = mode.allow_non_fake_inputs, True
    try:
        yield
    finally:
        mode.allow_non_fake_inputs = before


def propagate_shapes(gm: GraphModule, *inputs: Any) -> GraphModule:
    """Give every node of a copy its value without data, for graphs traced without any."""
    gm = copy(gm)
    mode = fake_mode(*inputs) or FakeTensorMode(allow_non_fake_inputs=True)
    FakeTensorProp(gm, mode).propagate(*inputs)
    return gm


@dataclass(frozen=True)
class SlotInput:
    """An input that belongs to a slot and not to the model: part of its state or its qparams."""

    slot: str
    key: str


def inputs_of(graph: Graph) -> list[Node]:
    return list(graph.find_nodes(op="placeholder"))


def slot_input(value: Any) -> SlotInput | None:
    """What an input that a pass added stands for; None for everything else."""
    found: SlotInput | None = value.meta.get(_INPUT) if isinstance(value, Node) else None
    return found


def slot_inputs(graph: Graph) -> dict[Node, SlotInput]:
    """Inputs that passes added, with what they stand for. They come after the model's own."""
    return {node: node.meta[_INPUT] for node in inputs_of(graph) if _INPUT in node.meta}


def add_input(graph: Graph, what: SlotInput, value: Any, pass_name: str) -> Node:
    """Add an input after all others, or return the one that is there for the same purpose."""
    for node, existing in slot_inputs(graph).items():
        if existing == what:
            return node
    inputs = inputs_of(graph)
    first = next(iter(graph.nodes))
    with graph.inserting_after(inputs[-1]) if inputs else graph.inserting_before(first):
        name = re.sub(r"\W", "_", f"{what.slot}_{what.key}")
        node = graph.placeholder(f"_{name}" if name[0].isdigit() else name)
    node.meta[_INPUT] = what
    node.meta["example_value"] = value
    return stamp(node, pass_name)


def bind(gm: GraphModule, values: Mapping[SlotInput, torch.Tensor]) -> GraphModule:
    """Turn inputs that passes added into constants of the module."""
    gm = copy(gm)
    for node, what in slot_inputs(gm.graph).items():
        name = node.name
        gm.register_buffer(name, values[what])
        with gm.graph.inserting_after(inputs_of(gm.graph)[-1]):
            constant = gm.graph.get_attr(name)
        constant.meta = dict(node.meta)
        node.replace_all_uses_with(constant)
        gm.graph.erase_node(node)
    gm.recompile()
    return gm


def mutates(node: Node) -> bool:
    """Whether an op may write to what it is given."""
    if node.op == "call_method":
        name = str(node.target)
        return (name.endswith("_") and not name.endswith("__")) or name == "__setitem__"
    if node.op != "call_function":
        return False
    if isinstance(node.target, torch._ops.OpOverload):
        return bool(node.target._schema.is_mutable)
    name = getattr(node.target, "__name__", "")
    in_place_operator = getattr(operator, name, None) is node.target and name.startswith("i")
    return (
        node.target is operator.setitem
        or (in_place_operator and name in _IN_PLACE_OPERATORS)
        or (name.endswith("_") and not name.endswith("__"))
        or bool(node.kwargs.get("inplace"))
        or "out" in node.kwargs
    )


_IN_PLACE_OPERATORS = {
    "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor",
    "ilshift", "irshift", "imatmul", "iconcat",
}  # fmt: skip


def require_nodes(nodes: Iterable[Node], problem: str) -> None:
    """Raise, naming the nodes, if there are any."""
    names = [node.name for node in nodes]
    if names:
        raise GraphError(f"{problem}: {', '.join(names)}")
