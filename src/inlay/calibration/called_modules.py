"""For which modules of the model a graph is called."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from inlay.graph import called_path, inputs_of, parameter_reads, weight_use
from inlay.recipe import Locate, Plan

__all__ = ["CalledModules"]


class CalledModules:
    """Finds the modules that a graph is called for, by the tensors that it is called with.

    It is part of compiled code, which may outlive the plan of a model, so it is given the plan.
    """

    def __init__(self, gm: GraphModule) -> None:
        inputs = {node: position for position, node in enumerate(inputs_of(gm.graph))}
        uses = ((weight_use(gm, node), called_path(node)) for node in gm.graph.nodes)
        found = [(use, path) for use, path in uses if use is not None and use.weight_node in inputs]
        # Modules that share a weight share an input: each use has a module of its own.
        self._weights = list(
            dict.fromkeys(
                (inputs[use.weight_node], use.kind, path) for use, path in found if use.weight_node
            )
        )
        self._reads = [
            (path, inputs[value])
            for path, value in parameter_reads(gm)
            if isinstance(value, Node) and value in inputs
        ]
        self._paths = list(dict.fromkeys(filter(None, map(called_path, gm.graph.nodes))))
        self._parameters: list[int] | None = None  # positions; found with the first call

    def key(self, plan: Plan, args: Sequence[Any]) -> tuple[int, ...]:
        """Return the identities of the arguments that tell modules apart."""
        if plan.recipe.equalize is None and not plan.shares_weights:
            return tuple(id(args[position]) for position, _, _ in self._weights)
        # Equalization also scales norms and biases, and these tell modules with one weight apart.
        if self._parameters is None:
            self._parameters = [n for n, arg in enumerate(args) if isinstance(arg, nn.Parameter)]
        return tuple(id(args[position]) for position in self._parameters)

    def with_weights(
        self, plan: Plan, args: Sequence[Any], root: str | None
    ) -> tuple[str | None, ...]:
        """Return the modules whose weights are among the arguments.

        :param root: the name of the block that runs, where it is known
        """
        located = self._locator(plan, args, root)
        return tuple(
            plan.owner(args[position], kind, path and located(path))
            for position, kind, path in self._weights
        )

    def quantized(self, plan: Plan, args: Sequence[Any], root: str | None) -> set[str]:
        """Return the quantized modules with a weight that ran, whether or not it was matched."""
        located = self._locator(plan, args, root)
        return {
            name
            for name in map(located, self._paths)
            if name in plan.kinds and plan.of_module(name)
        }

    def _locator(self, plan: Plan, args: Sequence[Any], root: str | None) -> Locate:
        reads = ((path, args[position]) for path, position in self._reads)
        return plan.locator(
            ((path, arg) for path, arg in reads if isinstance(arg, torch.Tensor)), root
        )
