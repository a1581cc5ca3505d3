"""How a graph sends rows to a stack of matrices: which rows each gets, of which tokens."""

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from inlay.graph import tensor_op

__all__ = ["Routing", "routing_by", "routing_of", "row_groups", "valid_rows"]

_CASTS = {"float", "int", "to", "_to_copy", "clone", "contiguous"}
_QUOTIENTS = {"floordiv", "floor_divide", "div"}
_SELECTIONS = {"getitem", "index", "index_select"}


@dataclass(frozen=True)
class Routing:
    """Where the rows of a grouped product come from.

    :param ends: the node with the row at which the rows of each group end
    :param tokens: the node with the number of the token that each row is of; None if unknown
    :param source: the node that has a row for each token; None if unknown
    """

    ends: Node
    tokens: Node | None
    source: Node | None


def routing_of(product: Node) -> Routing | None:
    """Read how the rows of a grouped product are routed; None if it names no ends of groups.

    Rows stand in the order of groups: transformers sorts the choices of all tokens, takes rows in
    that order, and counts them to find the ends.

        sorted, order = sort(chosen)
        rows = hidden[order // top_k]
        ends = cumsum(histc(sorted))
    """
    ends = product.args[2] if len(product.args) > 2 else product.kwargs.get("offs")
    return routing_by(ends) if isinstance(ends, Node) else None


def routing_by(ends: Node) -> Routing:
    """Read from where the rows of each group end how rows are routed."""
    everywhere = _everywhere(ends)
    if everywhere is not None:
        return everywhere
    for quotient in _token_numbers(ends):
        for user in quotient.users:
            if _name(user) in _SELECTIONS and quotient in _flat(user.args[1:]):
                source = user.args[0]
                if isinstance(source, Node):
                    return Routing(ends, quotient, source)
    return Routing(ends, None, None)


def _everywhere(ends: Node) -> Routing | None:
    """Return the routing of a node that gives every token to every group."""
    every = ends.args[0] if ends.target is operator.getitem else None
    if not isinstance(every, Node) or getattr(every.target, "__name__", "") != "every_token":
        return None
    tokens = next(user for user in every.users if user.args[1] == 2)
    source = every.args[0]
    return Routing(ends, tokens, source if isinstance(source, Node) else None)


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


def valid_rows(mask: torch.Tensor | None, tokens: torch.Tensor | None) -> torch.Tensor | None:
    """Tell for each row whether it is of a valid token; None if all are."""
    if mask is None or tokens is None:
        return None
    return (mask.reshape(-1) != 0)[tokens]


def row_groups(
    ends: torch.Tensor | None, valid: torch.Tensor | None
) -> Iterator[slice | torch.Tensor]:
    """Yield an index of the valid rows of each group, or of all rows if there are no groups."""
    start = 0
    for end in (None,) if ends is None else ends.tolist():
        rows = slice(start, end)
        yield rows if valid is None else start + valid[rows].nonzero().flatten()
        start = end or 0
