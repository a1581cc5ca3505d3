"""Find the parameters of a model that hold many matrices."""

from collections.abc import Iterator
from itertools import groupby

import torch
from torch import nn

from inlay.model.layouts import layout_of
from inlay.model.saved_names import saved_names
from inlay.model.weight import Stack

__all__ = ["StackedLinear", "find_stacks", "modules_with_stacks"]


class StackedLinear(nn.Linear):
    """What a recipe matches for a matrix of a stack: a Linear without data."""

    def __init__(self, shape: tuple[int, int]) -> None:
        nn.Module.__init__(self)  # there is no weight to initialize
        self.out_features, self.in_features = shape
        weight = torch.empty(shape, device="meta")
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.register_parameter("bias", None)


def modules_with_stacks(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that hold many matrices in one parameter."""
    for name, module in model.named_modules():
        layout = layout_of(name, module)
        if layout is not None and layout.kind == "grouped":
            yield name, module


def find_stacks(model: nn.Module) -> tuple[list[Stack], dict[str, str]]:
    """Find the stacks of a model, and the modules whose stacks are left alone, with reasons."""
    stacks: list[Stack] = []
    left: dict[str, str] = {}
    problems: dict[type[nn.Module], str | None] = {}
    for name, module in modules_with_stacks(model):
        layout = layout_of(name, module)
        assert layout is not None
        problem = layout.problem(module)
        if problem is None:
            views = groupby(layout.weights(name, module), lambda weight: weight.parameter)
            own = [Stack(parameter, tuple(weights)) for parameter, weights in views]
            if type(module) not in problems:  # a model saves all modules of a class alike
                problems[type(module)] = _problem_with_saving(model, own)
            problem = problems[type(module)]
        if problem is None:
            stacks += own
        else:
            left[name] = problem
    return stacks, left


def _problem_with_saving(model: nn.Module, stacks: list[Stack]) -> str | None:
    """Say why a checkpoint has no place for the scales of each matrix; None if it has."""
    if not hasattr(model, "save_pretrained"):  # it is not a model of transformers
        return None
    if all(saved_names(model, stack) for stack in stacks):
        return None
    return (
        f"{type(model).__name__} is saved with one tensor for all matrices of a layer, which has "
        "no place for scales of each"
    )
