"""Calls of modules as calls of their functions, so that what they compute with can be replaced."""

import torch.nn.functional as F
from torch import nn
from torch.fx import GraphModule, Node

from inlay.errors import GraphError
from inlay.graph.meta import stamp

__all__ = ["as_function"]


def as_function(gm: GraphModule, node: Node, pass_name: str) -> Node:
    """Rewrite a call of a module as a call of its function. Other nodes stay as they are."""
    if node.op != "call_module":
        return node
    module = gm.get_submodule(str(node.target))
    graph = gm.graph

    def parameter(name: str) -> Node | None:
        value = getattr(module, name, None)
        if value is None:
            return None
        attribute = stamp(graph.get_attr(f"{node.target}.{name}"), pass_name)
        attribute.meta["example_value"] = value
        return attribute

    value = node.args[0] if node.args else node.kwargs["input"]
    with graph.inserting_before(node):
        weight, bias = parameter("weight"), parameter("bias")
        if isinstance(module, nn.Linear):
            function = graph.call_function(F.linear, (value, weight, bias))
        elif isinstance(module, nn.Embedding):
            function = graph.call_function(
                F.embedding, (value, weight, module.padding_idx, module.max_norm)
            )
        elif isinstance(module, nn.LayerNorm):
            function = graph.call_function(
                F.layer_norm, (value, module.normalized_shape, weight, bias, module.eps)
            )
        elif isinstance(module, nn.RMSNorm):
            function = graph.call_function(
                F.rms_norm, (value, module.normalized_shape, weight, module.eps)
            )
        else:
            raise GraphError(f"{node.target} is a {type(module).__name__}, not a known function")
    function.meta = dict(node.meta)
    node.replace_all_uses_with(function)
    graph.erase_node(node)
    return stamp(function, pass_name)
