"""Values without data: what tracing knows of every node."""

from typing import Any

from torch.fx import GraphModule, Node
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from inlay.graph.editing import copy
from inlay.torch_private import FakeTensorMode, fake_mode_of

__all__ = ["fake_value", "propagate_shapes"]


def fake_value(node: Node) -> Any:
    """Return the value of a node without its data, as tracing left it."""
    return node.meta.get("example_value", node.meta.get("val"))


def propagate_shapes(gm: GraphModule, *inputs: Any) -> GraphModule:
    """Copy a graph that was traced without example inputs, and give every node its fake value."""
    gm = copy(gm)
    mode = fake_mode_of(*inputs) or FakeTensorMode(allow_non_fake_inputs=True)
    FakeTensorProp(gm, mode).propagate(*inputs)
    return gm
