"""Copy graphs and look at what their nodes do, before changing anything."""

import copy as _copy
import operator
from collections.abc import Iterable

from torch.fx import GraphModule, Node

from inlay.errors import GraphError
from inlay.torch_private import OpOverload

__all__ = ["copy", "mutates", "require_nodes"]


def copy(gm: GraphModule) -> GraphModule:
    """A graph module with a graph of its own over the same parameters and submodules.

    What the original says about where it comes from is left behind: AOTAutograd holds a graph that
    claims to be Dynamo's to rules that a rewritten one cannot keep.
    """
    # A deep copy of a graph copies its nodes; what they refer to stays the same.
    copied = GraphModule(gm, _copy.deepcopy(gm.graph), class_name=type(gm).__name__)
    copied.train(gm.training)
    return copied


def mutates(node: Node) -> bool:
    """Whether an op may write to what it is given."""
    if node.op == "call_method":
        name = str(node.target)
        return (name.endswith("_") and not name.endswith("__")) or name == "__setitem__"
    if node.op != "call_function":
        return False
    if isinstance(node.target, OpOverload):
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
