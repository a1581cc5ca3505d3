"""Drop all ops that statistics do not depend on."""

from dataclasses import dataclass
from typing import ClassVar

from torch.fx import GraphModule, Node

from inlay.errors import GraphError
from inlay.graph import Pass, PassResult, acts, copy, require_whole
from inlay.nodes.call_body import CallBody
from inlay.nodes.observe import Observe

__all__ = ["PruneUnobserved"]


@dataclass(frozen=True, kw_only=True)
class PruneUnobserved(Pass):
    """Drop the outputs and every op that no observation depends on.

    Before:                             After:
        observe(x, fc_input_seen, ...)      observe(x, fc_input_seen, ...)
        y = linear(x, w)                    return ()
        return y

    In a language model this drops the head and the last down projection, which may be a good part
    of the work. A graph that observes nothing is emptied. Ops that write to their inputs stay, with
    all they need, because the graph does not show who reads the result. Ops that change how others
    run stay too, such as those that open and close `vmap`.
    """

    keeps_function: ClassVar[bool] = False

    def requires(self, gm: GraphModule) -> None:
        require_whole(gm)

    def call(self, gm: GraphModule) -> PassResult:
        gm = copy(gm)
        (output,) = gm.graph.find_nodes(op="output")
        modified = output.args != ((),)
        output.args = ((),)
        needed: set[Node] = set()
        for node in reversed(gm.graph.nodes):
            if node in needed or _observes(node) or acts(node):
                needed.update(node.all_input_nodes, [node])
        for node in reversed(list(gm.graph.nodes)):
            if node not in needed and node.op != "placeholder":
                gm.graph.erase_node(node)
                modified = True
        gm.recompile()
        return PassResult(gm, modified)

    def ensures(self, gm: GraphModule) -> None:
        (output,) = gm.graph.find_nodes(op="output")
        if output.all_input_nodes:
            raise GraphError(f"the graph still returns {output.all_input_nodes}")


def _observes(node: Node) -> bool:
    if isinstance(node.target, CallBody):
        return node.target.observes
    return isinstance(node.target, Observe)
