"""How a graph sends rows to experts: which rows each expert gets, and which tokens they are."""

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from inlay.graph import tensor_op

__all__ = ["Routing", "routing_by", "routing_of", "rows_that_count"]

_CASTS = {"float", "int", "to", "_to_copy", "clone", "contiguous"}
_QUOTIENTS = {"floordiv", "floor_divide", "div"}
_SELECTIONS = {"getitem", "index", "index_select"}


@dataclass(frozen=True)
class Routing:
    """Where the rows of a grouped product come from.

    :param ends: the node with the row at which each expert's rows end
    :param tokens: the node with the number of the token that each row is of; None if unknown
    :param source: the node that has a row for each token; None if unknown
    """

    ends: Node
    tokens: Node | None
    source: Node | None


def routing_of(product: Node) -> Routing | None:
    """Read how the rows of a grouped product are routed; None if it names no ends of experts.

    Rows stand in the order of experts: transformers sorts the experts of all tokens, takes rows in
    that order, and counts them to find the ends.

        sorted, order = sort(experts)
        rows = hidden[order // top_k]
        ends = cumsum(histc(sorted))
    """
    ends = product.args[2] if len(product.args) > 2 else product.kwargs.get("offs")
    return routing_by(ends) if isinstance(ends, Node) else None


def routing_by(ends: Node) -> Routing:
    """Read from where the rows of each expert end how rows are routed."""
    for quotient in _token_numbers(ends):
        for user in quotient.users:
            if _name(user) in _SELECTIONS and quotient in _flat(user.args[1:]):
                source = user.args[0]
                if isinstance(source, Node):
                    return Routing(ends, quotient, source)
    return Routing(ends, None, None)


def _token_numbers(ends: Node) -> Iterator[Node]:
    """Yield the nodes that divide the order of the sort from which the ends were counted."""
    counted = _operand(ends, "cumsum")
    counted = _operand(counted, "histc") or _operand(counted, "bincount")
    while counted is not None and _name(counted) in _CASTS:
        counted = _source(counted)
    if counted is None or counted.target is not operator.getitem or counted.args[1] != 0:
        return
    sort = counted.args[0]
    if not isinstance(sort, Node) or _name(sort) not in ("sort", "argsort"):
        return
    for order in sort.users:
        if order.target is operator.getitem and order.args[1] == 1:
            yield from (user for user in order.users if _name(user) in _QUOTIENTS)


def _operand(node: Node | None, name: str) -> Node | None:
    return _source(node) if node is not None and _name(node) == name else None


def _source(node: Node) -> Node | None:
    given: Any = node.args[0] if node.args else node.kwargs.get("input")
    return given if isinstance(given, Node) else None


def _name(node: Node) -> str | None:
    return "getitem" if node.target is operator.getitem else tensor_op(node)


def _flat(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (tuple, list)):
            yield from value
        else:
            yield value


def rows_that_count(mask: torch.Tensor | None, tokens: torch.Tensor | None) -> torch.Tensor | None:
    """Tell of each row whether its token is one, and not padding; None if all are."""
    if mask is None or tokens is None:
        return None
    return (mask.reshape(-1) != 0)[tokens]
