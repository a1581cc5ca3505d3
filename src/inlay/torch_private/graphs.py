"""Private parts of torch: FX graphs."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule
from torch.fx._lazy_graph_module import _LazyGraphModule

__all__ = [
    "adopt_calling_convention",
    "example_of",
    "graph_break",
    "lazy_graph_module",
    "new_graph_like",
    "trace_symbolically",
]


def example_of(argument: Any) -> Any:
    """What Dynamo traced an input of a graph with; None if nobody keeps it any more.

    torch 2.1; `meta["grapharg"]` knows tensors by weak references, and says that one is gone by an
    AssertionError.
    """
    try:
        return argument.example
    except AssertionError:
        return None


def lazy_graph_module(root: nn.Module, graph: Graph, class_name: str) -> GraphModule:
    """A graph module that writes its Python code when it is first run or printed.

    A pipeline copies a graph for each pass and runs the last copy only. torch 2.2; a plain
    `GraphModule` does the same, later.
    """
    return _LazyGraphModule(root, graph, class_name)


def trace_symbolically(function: Callable[..., Any], *example: torch.Tensor) -> GraphModule:
    """Trace a function for tensors of every shape.

    torch 2.0, `make_fx`; `torch.export` with dynamic shapes is the public form, and refuses
    functions that are not modules.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    traced = make_fx(function, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*example)
    assert isinstance(traced, GraphModule)
    return traced


def new_graph_like(graph: Graph) -> Graph:
    """An empty graph of the same tracer. torch 1.13."""
    return Graph(tracer_cls=graph._tracer_cls)


def adopt_calling_convention(graph: Graph, like: Graph) -> None:
    """Let a graph take its arguments, and return its results, as another one does.

    torch 1.11; `set_codegen` is public, reading the codegen of a graph is not.
    """
    graph.set_codegen(like._codegen)


def graph_break() -> None:
    """End the graph that Dynamo traces here and start another one; do nothing without Dynamo.

    torch 2.0; else call any function that `torch.compiler.disable` wraps.
    """
    torch._dynamo.graph_break()
