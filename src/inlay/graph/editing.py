"""Copy graphs and look at what their nodes do, before changing anything."""

import copy as _copy
import operator
from collections.abc import Iterable, Iterator
from typing import Any

from torch.fx import GraphModule, Node

from inlay.errors import GraphError
from inlay.torch_private import (
    HigherOrderOperator,
    OpOverload,
    OpOverloadPacket,
    lazy_graph_module,
    written_operands,
)

__all__ = [
    "acts",
    "bodies_of",
    "body_held_by",
    "calls_outlined",
    "closes_transform",
    "copy",
    "leaves",
    "mutates",
    "opens_transform",
    "require_nodes",
    "require_whole",
    "switches_modes",
]


def copy(gm: GraphModule) -> GraphModule:
    """Copy a graph module: the graph is new, parameters and submodules are the same.

    The copy does not claim to come from Dynamo. AOTAutograd holds a graph that does to rules which
    a rewritten graph cannot keep.
    """
    # A deep copy of a graph copies its nodes, not the tensors and modules they refer to.
    copied = lazy_graph_module(gm, _copy.deepcopy(gm.graph), type(gm).__name__)
    copied.train(gm.training)
    return copied


def mutates(node: Node) -> bool:
    """Whether an op may write to its operands."""
    if node.op == "call_method":
        name = str(node.target)
        return (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE_METHODS
    if node.op != "call_function":
        return False
    if isinstance(node.target, (OpOverload, OpOverloadPacket)):
        written = written_operands(node.target, node.args, node.kwargs)
        return any(operand is not None for operand in written)
    name = getattr(node.target, "__name__", "")
    if isinstance(node.target, HigherOrderOperator):
        return _writes(node, name)
    in_place_operator = getattr(operator, name, None) is node.target and name.startswith("i")
    return (
        node.target is operator.setitem
        or (in_place_operator and name in _IN_PLACE_OPERATORS)
        or (name.endswith("_") and not name.endswith("__"))
        or bool(node.kwargs.get("inplace"))
        or node.kwargs.get("out") is not None
    )


_IN_PLACE_OPERATORS = {
    "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor",
    "ilshift", "irshift", "imatmul", "iconcat",
}  # fmt: skip
_IN_PLACE_METHODS = {"__setitem__", *(f"__{name}__" for name in _IN_PLACE_OPERATORS)}


def _writes(node: Node, name: str) -> bool:
    """Whether an op that runs graphs may write to its operands: whether those graphs do."""
    if name.endswith("_mutation"):
        return True
    bodies = bodies_of(node)
    if not bodies:  # nothing can be seen of what it does
        return name not in _FUNCTIONAL
    return any(mutates(inner) for body in bodies.values() for inner in body.graph.nodes)


_FUNCTIONAL = {"auto_functionalized", "auto_functionalized_v2", "triton_kernel_wrapper_functional"}


def bodies_of(node: Node) -> dict[Node, GraphModule]:
    """Find the graphs that an op runs, such as branches of `cond`, by the nodes holding them."""
    if node.op != "call_function":
        return {}
    held = {argument: body_held_by(argument) for argument in node.all_input_nodes}
    return {argument: body for argument, body in held.items() if body is not None}


def body_held_by(node: Node) -> GraphModule | None:
    """Return the graph that a `get_attr` node hands to an op; None for every other node."""
    owner = node.graph.owning_module
    if node.op != "get_attr" or owner is None:
        return None
    value = operator.attrgetter(str(node.target))(owner)
    return value if isinstance(value, GraphModule) else None


def opens_transform(node: Node) -> bool:
    """Whether ops from here on run under `vmap`, `grad` or the like."""
    return _function(node).endswith("_increment_nesting")


def closes_transform(node: Node) -> bool:
    """Whether the transform that was opened last ends here."""
    return _function(node).endswith("_decrement_nesting")


def switches_modes(node: Node) -> bool:
    """Whether an op changes how the ops after it are computed or recorded."""
    return _function(node) in _MODES


def acts(node: Node) -> bool:
    """Whether an op does something besides computing its value, and so stays if nobody reads it."""
    if mutates(node) or node.is_impure() or switches_modes(node):
        return True
    if opens_transform(node) or closes_transform(node) or _function(node) in _PREPARATIONS:
        return True
    bodies = bodies_of(node).values()
    return any(_acts_inside(inner) for body in bodies for inner in body.graph.nodes)


def _acts_inside(node: Node) -> bool:
    return node.op not in ("placeholder", "output") and acts(node)


def _function(node: Node) -> str:
    return str(getattr(node.target, "__name__", "")) if node.op == "call_function" else ""


_MODES = {
    "_enter_autocast", "_exit_autocast", "_set_grad_enabled",
    "_enter_inference_mode", "_exit_inference_mode",
}  # fmt: skip
# Calls that transforms make around the ops they transform.
_PREPARATIONS = {
    "lazy_load_decompositions", "_saved_tensors_hooks_disable", "_saved_tensors_hooks_enable",
    "set_inplace_requires_grad_allowed", "_set_tensor_requires_grad", "_set_fwd_grad_enabled",
    "_enter_dual_level", "_exit_dual_level",
}  # fmt: skip


def require_nodes(nodes: Iterable[Node], problem: str) -> None:
    """Raise, naming the nodes, if there are any."""
    names = [node.name for node in nodes]
    if names:
        raise GraphError(f"{problem}: {', '.join(names)}")


def require_whole(gm: GraphModule) -> None:
    """Raise if bodies of the graph are outlined: a pass would not see what is inside them."""
    outlined = (node for node in gm.graph.nodes if calls_outlined(node))
    require_nodes(outlined, "run this pass before repeats of the graph are outlined; found")


def calls_outlined(node: Node) -> bool:
    """Return whether a node calls a body that OutlineRepeats or OutlineObservers made."""
    return node.op == "call_module" and str(node.target).startswith("outlined_")


def leaves(value: Any) -> Iterator[Any]:
    """Yield what stands in nested tuples and lists."""
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from leaves(item)
    else:
        yield value
