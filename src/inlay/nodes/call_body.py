"""Nodes that run a graph of its own: a block that the model repeats."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["CallBody"]


@dataclass(frozen=True, eq=False)
class CallBody:
    """The callable of a node that runs a graph which observes or quantizes by itself.

    :param run: the graph; finds its slots by the weights that it is called with
    :param observes: whether anything in it is observed for these weights
    """

    run: Callable[..., Any]
    observes: bool = True
    __name__ = "body"

    def __call__(self, *operands: Any) -> Any:
        return self.run(*operands)
