"""Take the observers out of the graph."""

from dataclasses import dataclass

from torch.fx import GraphModule

from inlay.graph import (
    Pass,
    PassResult,
    copy,
    erase_with_inputs,
    observes,
    require_nodes,
    require_whole,
)

__all__ = ["RemoveObservers"]


@dataclass(frozen=True, kw_only=True)
class RemoveObservers(Pass):
    """Remove observe nodes, and the inputs that only they used.

    Before:                                  After:
        x, fc_input_seen, fc_input_min_vals      x
        observe_weight(w)                        y = linear(x, w)
        observe(x, fc_input_seen, ...)           return y
        y = linear(x, w)
        return y
    """

    def requires(self, gm: GraphModule) -> None:
        require_whole(gm)

    def call(self, gm: GraphModule) -> PassResult:
        gm = copy(gm)
        observers = [node for node in gm.graph.nodes if observes(node)]
        for node in observers:
            erase_with_inputs(gm.graph, node)
        gm.recompile()
        return PassResult(gm, bool(observers))

    def ensures(self, gm: GraphModule) -> None:
        require_nodes((node for node in gm.graph.nodes if observes(node)), "observers are left")
