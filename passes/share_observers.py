"""Observe the same value once."""

from dataclasses import dataclass

from torch.fx import GraphModule, Node

from inlay.graph import Pass, PassResult, copy, erase_with_inputs, mark_observer, mutates, observes
from inlay.nodes.observe import Observe

__all__ = ["ShareObservers"]


@dataclass(frozen=True, kw_only=True)
class ShareObservers(Pass):
    """Let one observe node stand for all that observe the same value by the same rule.

    Before:                             After:
        observe(x, q_input_seen, ...)       observe(x, q_input_seen, ...)  # q.input, k.input
        q = linear(x, wq)                   q = linear(x, wq)
        observe(x, k_input_seen, ...)       k = linear(x, wk)
        k = linear(x, wk)                   return q, k
        return q, k

    A value that is changed in place between the two is not the same value.
    """

    def call(self, gm: GraphModule) -> PassResult:
        gm = copy(gm)
        modified = False
        order = {node: index for index, node in enumerate(gm.graph.nodes)}
        kept: dict[tuple[object, ...], Node] = {}
        for node in list(gm.graph.nodes):
            if not isinstance(node.target, Observe):
                continue
            value = node.args[0]
            assert isinstance(value, Node)
            changes = sum(
                order.get(user, -1) < order[node] for user in value.users if mutates(user)
            )
            first = kept.setdefault((value, node.target, changes), node)
            if first is not node:
                mark_observer(first, (*observes(first), *observes(node)))
                erase_with_inputs(gm.graph, node)
                modified = True
        gm.recompile()
        return PassResult(gm, modified)
