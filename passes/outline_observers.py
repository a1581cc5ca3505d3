"""Cut observers out of the graph, and give identical ones one body."""

from dataclasses import dataclass

from torch.fx import GraphModule, Node

from inlay.nodes.observe import Observe
from inlay.passes.outline_repeats import OutlineRepeats

__all__ = ["OutlineObservers"]


@dataclass(frozen=True, kw_only=True)
class OutlineObservers(OutlineRepeats):
    """Make every observe node a call, and of identical ones the same call.

    Before:                              After:
        observe(x, q_input_seen, ...)        region_0(x, q_input_seen, ...)
        y = linear(x, w)                     y = linear(x, w)
        observe(y, o_input_seen, ...)        region_0(y, o_input_seen, ...)
        z = linear(y, v)                     z = linear(y, v)
        return z                             return z

    The observers can then be compiled while the rest runs op by op. Observe nodes are identical if
    they follow the same rule for values of the same shape. An opaque one stays where it is.

    :param observers: names of the observers to cut out
    """

    observers: frozenset[str]

    def pieces(self, gm: GraphModule) -> list[list[Node]]:
        return [[node] for node in gm.graph.nodes if self._is_cut_out(node)]

    def _is_cut_out(self, node: Node) -> bool:
        target = node.target
        return (
            isinstance(target, Observe)
            and not target.is_opaque
            and target.rule.name in self.observers
        )
