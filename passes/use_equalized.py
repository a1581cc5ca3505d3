"""Have the graph compute with equalized parameters."""

from dataclasses import dataclass

from torch.fx import GraphModule, Node

from inlay.equalization.parameters import EqualizedParameters
from inlay.graph import (
    EqualizedOf,
    Pass,
    PassResult,
    add_input,
    as_function,
    copy,
    fake_value,
    observes,
    require_nodes,
    require_whole,
    tensor_of,
)
from inlay.nodes.call_body import CallBody

__all__ = ["UseEqualized"]


@dataclass(frozen=True, kw_only=True)
class UseEqualized(Pass):
    """Replace the parameters that equalization scales by inputs for their scaled copies.

    Before:                       After:
        x, w, v                       x, w, v, norm_weight_equalized, fc_weight_equalized
        h = rms_norm(x, w)            h = rms_norm(x, norm_weight_equalized)
        y = linear(h, v)              y = linear(h, fc_weight_equalized)
        return y                      return y

    Weights that FoldQParams replaced are scaled already and stay. A body that is called with a
    parameter looks up the copy by itself.

    :param equalized: the scaled copies; None if nothing is equalized
    """

    equalized: EqualizedParameters | None = None

    def requires(self, gm: GraphModule) -> None:
        require_whole(gm)

    def call(self, gm: GraphModule) -> PassResult:
        gm = copy(gm)
        if self.equalized is None or not self.equalized.changed:
            return PassResult(gm, False)
        for node in list(gm.graph.nodes):
            if node.op == "call_module":
                module = gm.get_submodule(str(node.target))
                if any(map(self.equalized.is_changed, module.parameters())):
                    as_function(gm, node, self.name)
        modified = False
        for node in list(gm.graph.nodes):
            modified |= self._replace(gm, node)
        gm.recompile()
        return PassResult(gm, modified)

    def ensures(self, gm: GraphModule) -> None:
        if self.equalized is not None:
            left = (node for node in gm.graph.nodes if self._name(gm, node) and _readers(node))
            require_nodes(left, "these parameters are equalized, and read as they were")

    def _replace(self, gm: GraphModule, node: Node) -> bool:
        name, readers = self._name(gm, node), _readers(node)
        if name is None or not readers:
            return False
        value = fake_value(node)
        fake = tensor_of(gm, node) if value is None else value
        scaled = add_input(gm.graph, EqualizedOf(name), fake, self.name)
        for reader in readers:
            reader.replace_input_with(node, scaled)
        return True

    def _name(self, gm: GraphModule, node: Node) -> str | None:
        """The name of the scaled parameter that a node holds."""
        tensor = tensor_of(gm, node)
        if tensor is None or self.equalized is None or not self.equalized.is_changed(tensor):
            return None
        return self.equalized.name_of(tensor)


def _readers(node: Node) -> list[Node]:
    return [
        user for user in node.users if not observes(user) and not isinstance(user.target, CallBody)
    ]
