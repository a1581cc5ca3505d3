"""Find the ops that a recipe wants quantized."""

from dataclasses import dataclass

from torch.fx import GraphModule, Node

from inlay.graph import (
    Pass,
    PassResult,
    annotate,
    attention_states,
    called_path,
    copy,
    parameter_reads,
    require_whole,
    root_of,
    tensor_of,
    transformed_nodes,
    weight_use,
)
from inlay.recipe import Locate, Plan, Slot

__all__ = ["Annotate"]


@dataclass(frozen=True, kw_only=True)
class Annotate(Pass):
    """Write on every op that uses a targeted module which slots it has.

    Before:                             After:
        x                                   x
        y = linear(x, fc_weight)            y = linear(x, fc_weight)  # fc.weight, fc.input
        return y                            return y

    An op is matched by the weight it uses, by identity and not by name. So a module that is called
    twice is one module, and a linear op over any other tensor is left alone. Where several modules
    share a weight, the module that was called tells whose slots an op has. Attention has no weight
    of its own and is matched by the module it was traced in. An op under `vmap` or `grad` is left
    alone: a state cannot be written to from there.
    """

    plan: Plan

    def requires(self, gm: GraphModule) -> None:
        require_whole(gm)

    def call(self, gm: GraphModule) -> PassResult:
        gm = copy(gm)
        modified = False
        located = _locator(gm, self.plan)
        transformed = transformed_nodes(gm.graph.nodes)
        for node in gm.graph.nodes:
            slots = {} if node in transformed else self._slots(gm, node, located)
            modified |= annotate(node, slots)
        return PassResult(gm, modified)

    def _slots(self, gm: GraphModule, node: Node, located: Locate) -> dict[str, Slot]:
        use, path = weight_use(gm, node), called_path(node)
        name = None if path is None else located(path)
        if use is not None:
            owner = self.plan.owner(use.weight, use.kind, name)
            if owner is None:
                return {}
            return {**self.plan.of_module(owner), **self.plan.watches(owner)}
        if name is not None and attention_states(node) is not None:
            return self.plan.of_module(name)
        return {}


def _locator(gm: GraphModule, plan: Plan) -> Locate:
    """From names in the trace to names in the model."""
    reads = (
        (path, tensor)
        for path, value in parameter_reads(gm)
        if (tensor := tensor_of(gm, value) if isinstance(value, Node) else value) is not None
    )
    return plan.locator(reads, root_of(gm))
