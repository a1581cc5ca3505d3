"""What Inlay writes on `node.meta`: all its keys, and the functions that read and write them."""

from collections.abc import Mapping

from torch.fx import GraphModule, Node

from inlay.graph.equalizable import Equalizable
from inlay.recipe import Slot

__all__ = [
    "annotate",
    "equalizable",
    "folded_parts",
    "made_by",
    "mark_equalizable",
    "mark_folded",
    "mark_observer",
    "mark_root",
    "observes",
    "root_of",
    "slots_of",
    "stamp",
]

_SLOTS = "inlay_slots"  # the slots of an op, by base name
_OBSERVES = "inlay_observes"  # the slots that an observe node observes
_FOLDED = "inlay_folded"  # the base names of an op whose qparams are in the graph already
_MADE_BY = "inlay_made_by"  # the pass that made a node
_EQUALIZABLE = "inlay_equalizable"  # on the output: groups of the graph that can be equalized
_ROOT = "inlay_root"  # on the output: the name of the module that the graph runs


def stamp(node: Node, pass_name: str) -> Node:
    """Record which pass made the node."""
    node.meta[_MADE_BY] = pass_name
    return node


def made_by(node: Node) -> str | None:
    """The name of the pass that made the node; None if it was traced."""
    name = node.meta.get(_MADE_BY)
    return name if isinstance(name, str) else None


def slots_of(node: Node) -> Mapping[str, Slot]:
    """The slots of an op, by base name; none for ops that a recipe does not quantize."""
    slots: Mapping[str, Slot] = node.meta.get(_SLOTS, {})
    return slots


def annotate(node: Node, slots: Mapping[str, Slot]) -> bool:
    """Write slots on an op. Return whether that changed anything."""
    if slots_of(node) == slots:
        return False
    node.meta[_SLOTS] = dict(slots)
    return True


def observes(node: Node) -> tuple[Slot, ...]:
    """The slots that an observe node observes; none for other nodes."""
    slots: tuple[Slot, ...] = node.meta.get(_OBSERVES, ())
    return slots


def mark_observer(node: Node, slots: tuple[Slot, ...]) -> None:
    """Record which slots an observe node observes."""
    node.meta[_OBSERVES] = slots


def folded_parts(node: Node) -> frozenset[str]:
    """The base names of an op whose qparams are folded into the graph."""
    parts: frozenset[str] = node.meta.get(_FOLDED, frozenset())
    return parts


def mark_folded(node: Node, base_name: str) -> None:
    """Record that the qparams of one slot of an op are in the graph now."""
    node.meta[_FOLDED] = folded_parts(node) | {base_name}


def equalizable(gm: GraphModule) -> Equalizable | None:
    """What the graph says about equalization; None if nobody has asked."""
    (output,) = gm.graph.find_nodes(op="output")
    found: Equalizable | None = output.meta.get(_EQUALIZABLE)
    return found


def mark_equalizable(gm: GraphModule, found: Equalizable) -> None:
    """Write on the output, which every graph has, what can be equalized in it."""
    (output,) = gm.graph.find_nodes(op="output")
    output.meta[_EQUALIZABLE] = found


def root_of(gm: GraphModule) -> str | None:
    """The name of the module that the graph runs; None if it is not known."""
    (output,) = gm.graph.find_nodes(op="output")
    root: str | None = output.meta.get(_ROOT)
    return root


def mark_root(gm: GraphModule, root: str) -> None:
    """Write on the output which module the graph runs: paths in the graph start there."""
    (output,) = gm.graph.find_nodes(op="output")
    output.meta[_ROOT] = root
