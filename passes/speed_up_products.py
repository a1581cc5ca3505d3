"""Leave the products of linear layers to the faster library."""

from dataclasses import dataclass

from torch.fx import GraphModule, Node

from inlay.graph import (
    Pass,
    PassResult,
    copy,
    fake_value,
    is_linear,
    require_nodes,
    stamp,
    weight_use,
)
from inlay.nodes.fast_linear import fast_linear, is_float32_on_cpu

__all__ = ["SpeedUpProducts"]


@dataclass(frozen=True, kw_only=True)
class SpeedUpProducts(Pass):
    """Have oneDNN multiply float32 matrices on a CPU.

    Before:                     After:
        x, w                        x, w
        y = linear(x, w)            y = fast_linear(x, w)
        return y                    return y

    torch leaves these products to MKL, which some processors run at half the speed of oneDNN. The
    results differ in their last bits. Run it last: other passes look for linear ops.

    :param smallest: weights with fewer elements stay; calling oneDNN takes a little longer
    """

    smallest: int = 2**14

    def call(self, gm: GraphModule) -> PassResult:
        gm = copy(gm)
        found = [node for node in gm.graph.nodes if self._applies_to(gm, node)]
        for node in found:
            node.target = fast_linear
            stamp(node, self.name)
        gm.recompile()
        return PassResult(gm, bool(found))

    def ensures(self, gm: GraphModule) -> None:
        left = (node for node in gm.graph.nodes if self._applies_to(gm, node))
        require_nodes(left, "these products could be left to oneDNN")

    def _applies_to(self, gm: GraphModule, node: Node) -> bool:
        use = weight_use(gm, node) if is_linear(node) else None
        if use is None or use.value is None or use.weight_node is None:
            return False
        value, weight = fake_value(use.value), fake_value(use.weight_node)
        return (
            is_float32_on_cpu(value)
            and is_float32_on_cpu(weight)
            and weight.ndim == 2
            and weight.numel() >= self.smallest
        )
