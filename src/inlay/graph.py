"""Helpers for FX graphs."""

import copy as _copy

from torch.fx import GraphModule, Node

__all__ = ["copy", "made_by", "stamp"]

_MADE_BY = "inlay_made_by"


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
