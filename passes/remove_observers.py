"""Take the observers out of the graph."""

from dataclasses import dataclass

from torch.fx import GraphModule

from inlay.graph import copy, made_by, require_nodes, slot_inputs
from inlay.pass_base import Pass, PassResult
from inlay.state import observes

__all__ = ["RemoveObservers"]


@dataclass(frozen=True, kw_only=True)
class RemoveObservers(Pass):
    """Remove observe nodes, and the inputs that only they used.

    Before:                                  After:
        x, fc_input_seen, fc_input_min_vals      x
        observe(x, fc_input_seen, ...)           y = linear(x, w)
        observe_weight(w)                        return y
        y = linear(x, w)
        return y
    """

    def call(self, gm: GraphModule) -> PassResult:
        gm = copy(gm)
        observers = [node for node in gm.graph.nodes if observes(node)]
        for node in observers:
            gm.graph.erase_node(node)
        leftovers = [*slot_inputs(gm.graph), *gm.graph.find_nodes(op="get_attr")]
        for node in leftovers:
            if made_by(node) is not None and not node.users:
                gm.graph.erase_node(node)
        gm.recompile()
        return PassResult(gm, bool(observers))

    def ensures(self, gm: GraphModule) -> None:
        require_nodes((node for node in gm.graph.nodes if observes(node)), "observers are left")
