"""Ops that run graphs, such as `cond`, and stretches of a graph that run under `vmap` or `grad`."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from inlay.graph.editing import bodies_of, closes_transform, leaves, opens_transform
from inlay.graph.inputs import tensor_of
from inlay.graph.matching import attention_states, module_path, weight_use
from inlay.recipe import Plan, Slot

__all__ = ["EnclosedSlot", "enclosed_slots", "transformed_nodes"]

# Why an op inside cannot be observed, by what it stands in.
_REASONS = {
    "cond": "which branch runs depends on data",
    "while_loop": "how often it runs depends on data",
    "while_loop_stack_output": "how often it runs depends on data",
    "map": "it sees one slice of a value at a time",
    "scan": "it sees one slice of a value at a time",
    "associative_scan": "it sees one slice of a value at a time",
    "flex_attention": "it sees one score at a time",
    "vmap": "it sees one item of a batch at a time",
    "grad": "values that are being differentiated cannot be written to a state",
    "jvp": "values that are being differentiated cannot be written to a state",
}
_OTHERWISE = "how and how often its graph runs is up to that op"


@dataclass(frozen=True)
class EnclosedSlot:
    """A slot whose op stands where it cannot be observed or folded."""

    slot: Slot
    inside: str  # what the op stands in: the kind, and the name of the node
    reason: str
    elsewhere: bool  # whether another op of the same slot stands where it can be

    def __str__(self) -> str:
        what = "not folded into the graph" if self.slot.is_weight else "not observed"
        if self.elsewhere:
            return f"{self.slot.name} is {what} in {self.inside}, only elsewhere: {self.reason}"
        return f"{self.slot.name} is {what}: its op stands inside {self.inside}, and {self.reason}"


def transformed_nodes(nodes: Iterable[Node]) -> dict[Node, Node]:
    """Nodes that run under a transform such as `vmap`, each with the op that opened it."""
    inside: dict[Node, Node] = {}
    opened: list[Node] = []
    for node in nodes:
        if opens_transform(node):
            opened.append(node)
        if opened:
            inside[node] = opened[-1]
        if closes_transform(node) and opened:
            opened.pop()
    return inside


def enclosed_slots(
    gm: GraphModule, plan: Plan, tensors: Mapping[str, torch.Tensor] | None = None
) -> list[EnclosedSlot]:
    """Slots of ops inside ops that run graphs, or under a transform: these are left alone.

    :param tensors: the very tensors behind inputs of the graph by name, where the graph itself does
        not know them
    """
    known: dict[Node, torch.Tensor | None] = {}
    for node in gm.graph.find_nodes(op="placeholder"):
        known[node] = (tensors or {}).get(node.name)
    outside = {slot.name for node in _outside(gm) for slot in _slots(gm, node, plan, known)}
    found: dict[tuple[str, str], EnclosedSlot] = {}
    for slot, kind, name in _enclosed(gm, plan, known):
        inside = f"{kind} ({name})"
        reason = _REASONS.get(kind, _OTHERWISE)
        found[slot.name, inside] = EnclosedSlot(slot, inside, reason, slot.name in outside)
    return list(found.values())


def _outside(gm: GraphModule) -> Iterator[Node]:
    transformed = transformed_nodes(gm.graph.nodes)
    return (node for node in gm.graph.nodes if node not in transformed)


def _enclosed(
    gm: GraphModule, plan: Plan, known: Mapping[Node, torch.Tensor | None]
) -> Iterator[tuple[Slot, str, str]]:
    """Slots inside, each with the kind and the name of the outermost op around them."""
    transformed = transformed_nodes(gm.graph.nodes)
    for node in gm.graph.nodes:
        if node in transformed:
            opener = transformed[node]
            kind = _kind(opener).strip("_").partition("_")[0]
            for slot in (*_slots(gm, node, plan, known), *_inside(gm, node, plan, known)):
                yield slot, kind, opener.name
        else:
            for slot in _inside(gm, node, plan, known):
                yield slot, _kind(node), node.name


def _inside(
    gm: GraphModule, node: Node, plan: Plan, known: Mapping[Node, torch.Tensor | None]
) -> Iterator[Slot]:
    """Slots of the ops in the bodies that an op runs, at any depth."""
    for body, operands in _calls(node):
        inputs = list(body.graph.find_nodes(op="placeholder"))
        # Values that an op makes itself, such as the state of a loop, come first; what it hands on
        # as it is comes last.
        pairs = zip(reversed(inputs), reversed(operands), strict=False)
        inner = {
            placeholder: known.get(operand)
            if known.get(operand) is not None
            else tensor_of(gm, operand)
            for placeholder, operand in pairs
            if isinstance(operand, Node)
        }
        for one in body.graph.nodes:
            yield from _slots(body, one, plan, inner)
            yield from _inside(body, one, plan, inner)


def _calls(node: Node) -> Iterator[tuple[GraphModule, list[Any]]]:
    """Bodies that an op runs, each with the operands that end up in its last inputs."""
    bodies = bodies_of(node)
    if not bodies:
        return
    if _kind(node) == "flex_attention":
        # The values that score_mod and mask_mod capture are the last two arguments.
        for body, operands in zip(bodies.values(), node.args[-2:], strict=False):
            yield body, list(operands) if isinstance(operands, (tuple, list)) else []
        return
    operands = [leaf for leaf in leaves(node.args) if not _is_one_of(leaf, bodies)]
    for body in bodies.values():
        yield body, operands


def _slots(
    gm: GraphModule, node: Node, plan: Plan, known: Mapping[Node, torch.Tensor | None]
) -> list[Slot]:
    """The slots that an op would have, if it stood in the open."""
    use = weight_use(gm, node)
    if use is not None:
        given = None if use.weight_node is None else known.get(use.weight_node)
        weight = use.weight if given is None else given
        owner = plan.owner(weight, use.kind, module_path(node))
        return [] if owner is None else list(plan.of_module(owner).values())
    path = module_path(node)
    if path is None or attention_states(node) is None:
        return []
    return list(plan.of_module(path).values())


def _is_one_of(value: Any, nodes: Mapping[Node, Any]) -> bool:
    return isinstance(value, Node) and value in nodes


def _kind(node: Node) -> str:
    return str(getattr(node.target, "__name__", node.target)).removesuffix("_impl")
