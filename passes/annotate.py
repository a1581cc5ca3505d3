"""Find the ops that a recipe wants quantized."""

from collections.abc import Callable
from dataclasses import dataclass

from torch.fx import GraphModule, Node

from inlay.graph import (
    Pass,
    PassResult,
    annotate,
    attention_states,
    copy,
    module_path,
    require_whole,
    transformed_nodes,
    weight_use,
)
from inlay.recipe import Plan, Slot

__all__ = ["Annotate"]


@dataclass(frozen=True, kw_only=True)
class Annotate(Pass):
    """Write on every op that uses a targeted module which slots it has.

    Before:                             After:
        x                                   x
        y = linear(x, fc_weight)            y = linear(x, fc_weight)  # fc.weight, fc.input
        return y                            return y

    An op is matched by the weight it uses, by identity and not by name, so a module that is called
    twice is one module, tied weights are one weight, and a linear op over any other tensor is left
    alone. Attention has no weight of its own and is matched by the module it was traced in, whose
    name is known from a weight beside it. An op under `vmap` or `grad` is left alone: a state
    cannot be written to from there.
    """

    plan: Plan

    def requires(self, gm: GraphModule) -> None:
        require_whole(gm)

    def call(self, gm: GraphModule) -> PassResult:
        gm = copy(gm)
        modified = False
        located = self._locator(gm)
        transformed = transformed_nodes(gm.graph.nodes)
        for node in gm.graph.nodes:
            slots = {} if node in transformed else self._slots(gm, node, located)
            modified |= annotate(node, slots)
        return PassResult(gm, modified)

    def _slots(self, gm: GraphModule, node: Node, located: Callable[[str], str]) -> dict[str, Slot]:
        use = weight_use(gm, node)
        if use is not None:
            owner = self.plan.owner(use.weight, use.kind)
            return {} if owner is None else _with_importance(self.plan.of_module(owner))
        if attention_states(node) is not None:
            path = module_path(node)
            return {} if path is None else self.plan.of_module(located(path))
        return {}

    def _locator(self, gm: GraphModule) -> Callable[[str], str]:
        """From names in the trace to names in the model.

        A part of the model may be traced, or more than it, or one block that stands for many.
        """
        moves = []
        for node in gm.graph.nodes:
            use, path = weight_use(gm, node), module_path(node)
            owner = None if use is None else self.plan.owner(use.weight, use.kind)
            if owner is not None and path is not None:
                moves.append(_move(path.split("."), owner.split(".")))
        # Modules that share a weight go by the name of one of them, which says nothing of others.
        plain = [(old, new) for old, new in moves if not old or not new]
        if not plain and len(set(moves)) != 1:
            return lambda name: name
        old, new = (plain or moves)[0]

        def located(name: str) -> str:
            inside = not old or name == old or name.startswith(f"{old}.")
            rest = name.removeprefix(old).removeprefix(".")
            return ".".join(filter(None, (new, rest))) if inside else name

        return located


def _move(traced: list[str], actual: list[str]) -> tuple[str, str]:
    """What stands before the part that two names have in common, in either."""
    while traced and actual and traced[-1] == actual[-1]:
        traced, actual = traced[:-1], actual[:-1]
    return ".".join(traced), ".".join(actual)


def _with_importance(slots: dict[str, Slot]) -> dict[str, Slot]:
    """Slots of a module, and one for its input where the observer of its weight asks for that."""
    importance = slots["weight"].importance if "weight" in slots else None
    return slots if importance is None else {**slots, importance.base_name: importance}
