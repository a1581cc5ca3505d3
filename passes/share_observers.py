"""Observe the same value once."""

from dataclasses import dataclass

from torch.fx import GraphModule, Node

from inlay.graph import (
    Pass,
    PassResult,
    Writes,
    copy,
    erase_with_inputs,
    mark_observer,
    observes,
    require_whole,
)
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

    A value that is changed in place between the two is not the same value. Slots share only if they
    see the same values throughout: a module that is called again with another value keeps its own
    statistics.
    """

    def requires(self, gm: GraphModule) -> None:
        require_whole(gm)

    def call(self, gm: GraphModule) -> PassResult:
        gm = copy(gm)
        modified = False
        writes = Writes(gm.graph)
        observers = [node for node in gm.graph.nodes if isinstance(node.target, Observe)]
        what = {node: _what(node, writes) for node in observers}
        seen: dict[str, set[_What]] = {}
        for node in observers:
            for slot in observes(node):
                seen.setdefault(slot.name, set()).add(what[node])
        kept: dict[tuple[_What, frozenset[_What]], Node] = {}
        for node in observers:
            all_of_it = frozenset(seen[observes(node)[0].name])
            first = kept.setdefault((what[node], all_of_it), node)
            if first is not node:
                mark_observer(first, (*observes(first), *observes(node)))
                erase_with_inputs(gm.graph, node)
                modified = True
        gm.recompile()
        return PassResult(gm, modified)


_What = tuple[Node, Observe, int]


def _what(node: Node, writes: Writes) -> _What:
    """Return the value a node observes, its rule, and how often the value was changed before."""
    value = node.args[0]
    assert isinstance(value, Node)
    assert isinstance(node.target, Observe)
    return value, node.target, writes.before(node, value)
