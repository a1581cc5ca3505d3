"""All uses of parameters in a graph, so that none is scaled that is also used otherwise."""

from collections.abc import Iterator

from torch import nn
from torch.fx import GraphModule, Node

from inlay.equalization.ops import is_tensor, parameters_of, source_of
from inlay.equalization.search import Search
from inlay.graph import Source, Use, observes, transposed_by, weight_use
from inlay.model import PRODUCTS
from inlay.nodes.call_body import CallBody

__all__ = ["uses_of_parameters"]


def uses_of_parameters(gm: GraphModule, groups: list[Search]) -> Iterator[Use]:
    """Yield all uses of parameters, and the groups that scale them there."""
    reading = {node: number for number, group in enumerate(groups) for node in group.readers}
    making = {node: number for number, group in enumerate(groups) for node in group.makers}
    vectors = {pair: number for number, group in enumerate(groups) for pair in group.vectors}
    for node in gm.graph.nodes:
        if node.op == "call_module":
            yield from _uses_by_module(gm, node, groups, reading.get(node), making.get(node))
        if node.op not in ("placeholder", "get_attr") or not is_tensor(node):
            continue
        source = source_of(node)
        users = [u for user in node.users for u in (user.users if transposed_by(user) else [user])]
        for user in users:
            use = weight_use(gm, user)
            if observes(user) or isinstance(user.target, CallBody):
                continue  # a body knows its own uses
            if use is not None and use.kind in PRODUCTS and use.weight_node is node:
                yield Use(source, "columns", reading.get(user))
                yield Use(source, "rows", making.get(user))
            elif (node, user) in vectors:
                yield Use(source, "vector", vectors[node, user])
            else:
                yield Use(source, "other", None)


def _uses_by_module(
    gm: GraphModule, node: Node, groups: list[Search], reading: int | None, making: int | None
) -> Iterator[Use]:
    module = gm.get_submodule(str(node.target))
    if isinstance(module, nn.Linear):
        weight, bias = parameters_of(gm, node)
        yield Use(weight, "columns", reading)
        yield Use(weight, "rows", making)
        if bias is not None:
            yield Use(bias, "vector", making)
        return
    number = next((n for n, group in enumerate(groups) if group.scales(node)), None)
    for name, _ in module.named_parameters():
        yield Use(Source(f"{node.target}.{name}", False), "vector", number)
