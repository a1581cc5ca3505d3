"""Experts that a model keeps in one parameter, as the Linear modules that a recipe speaks of.

transformers holds a projection of all experts of a layer in one parameter of three dimensions.
Checkpoints and recipes know a Linear for each: `model.layers.0.mlp.experts.3.gate_proj`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from inlay.transformers_private import as_saved

__all__ = [
    "ExpertLinear",
    "ExpertStack",
    "expert_stacks",
    "experts_in_one_parameter",
    "saved_names",
]


class ExpertLinear(nn.Linear):
    """A projection of one expert, whose weight is a part of the parameter of all experts."""

    def __init__(self, weight: torch.Tensor) -> None:
        nn.Module.__init__(self)  # there is no weight to be made
        self.out_features, self.in_features = weight.shape
        self.weight = nn.Parameter(weight.detach(), requires_grad=False)
        self.register_parameter("bias", None)


@dataclass(frozen=True, eq=False)
class ExpertStack:
    """A parameter with one projection of all experts, or with two that read the same value.

    :param name: of the parameter, `model.layers.0.mlp.experts.gate_up_proj` for example
    :param parameter: of shape (experts, rows, columns)
    :param projections: names of what its rows hold, from first to last, in equal parts
    """

    name: str
    parameter: torch.Tensor
    projections: tuple[str, ...]

    @property
    def experts(self) -> str:
        """The name of the module that has the parameter."""
        return self.name.rpartition(".")[0]

    @cached_property
    def members(self) -> dict[str, torch.Tensor]:
        """The weights of all experts by the names of their Linear modules, in order."""
        return self.parts_of(self.parameter)

    def parts_of(self, stacked: torch.Tensor) -> dict[str, torch.Tensor]:
        """Cut a tensor of the parameter's shape into the parts that belong to the members."""
        return {
            f"{self.experts}.{number}.{projection}": part
            for number, expert in enumerate(stacked.detach().unbind())
            for projection, part in zip(
                self.projections, expert.chunk(len(self.projections)), strict=True
            )
        }


def experts_in_one_parameter(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield modules that hold many experts in one parameter."""
    for name, module in model.named_modules():
        parameters = module.parameters(recurse=False)
        if name.endswith("experts") and any(parameter.dim() == 3 for parameter in parameters):
            yield name, module


def expert_stacks(model: nn.Module) -> tuple[list[ExpertStack], dict[str, str]]:
    """Find the parameters with experts, and the modules that are left alone, with reasons."""
    stacks: list[ExpertStack] = []
    unknown: dict[str, str] = {}
    places: dict[type[nn.Module], str | None] = {}
    for name, module in experts_in_one_parameter(model):
        problem = _problem(module)
        if problem is not None:
            unknown[name] = problem
            continue
        own = [
            ExpertStack(f"{name}.{parameter}", module.get_parameter(parameter), projections)
            for parameter, projections in _layout(module).items()
        ]
        if type(module) not in places:  # a model saves all of a class in the same way
            places[type(module)] = _problem_with_saving(model, own)
        reason = places[type(module)]
        if reason is None:
            stacks += own
        else:
            unknown[name] = reason
    return stacks, unknown


def saved_names(model: nn.Module, stack: ExpertStack) -> dict[str, str]:
    """Return the names that experts have when transformers saves them, by those in the model.

    Empty if it does not save a matrix for each.
    """
    places = _places(model, stack)
    if not places.keys() >= set(range(len(stack.members))):
        return {}
    return {name: places[number] for number, name in enumerate(stack.members)}


def _problem_with_saving(model: nn.Module, stacks: Sequence[ExpertStack]) -> str | None:
    """Why a checkpoint has no place for the scales of single experts; None if it has."""
    if not hasattr(model, "save_pretrained"):  # it is no model of transformers
        return None
    if all(saved_names(model, stack) for stack in stacks):
        return None
    return (
        f"{type(model).__name__} is saved with one tensor for all experts of a layer, which has "
        "no place for scales of each"
    )


def _places(model: Any, stack: ExpertStack) -> dict[int, str]:
    """Find the names under which transformers saves matrices, by the number of the member."""
    # Numbers in place of rows tell which part of the parameter is saved under which name.
    experts, rows, _ = stack.parameter.shape
    parts = len(stack.projections)
    numbers = torch.arange(experts * parts).repeat_interleave(rows // parts)
    # Of two columns: transformers drops a dimension of size one.
    marked = numbers.reshape(experts, rows, 1).repeat(1, 1, 2)
    saved = as_saved(model, {stack.name: marked})
    return {
        int(tensor.flatten()[0]): name.removesuffix(".weight")
        for name, tensor in saved.items()
        if tensor.dim() == 2
    }


def _layout(module: nn.Module) -> Mapping[str, tuple[str, ...]]:
    if getattr(module, "has_gate", True):
        return {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
    return {"up_proj": ("up_proj",), "down_proj": ("down_proj",)}


def _problem(module: nn.Module) -> str | None:
    """Why the parts of the parameters are not those of Linear modules; None if they are."""
    flags = {flag: getattr(module, flag, None) for flag in _FLAGS}
    if None in flags.values():
        return "it does not say how its experts are laid out"
    odd = [words for flag, (usual, words) in _FLAGS.items() if flags[flag] != usual]
    if odd:
        return f"its experts {' and '.join(odd)}"
    own = dict(module.named_parameters(recurse=False))
    if set(own) != set(_layout(module)) or any(each.dim() != 3 for each in own.values()):
        return f"it has the parameters {', '.join(own)}"
    return None


# What transformers says of a layout: what is usual, and what it is if it is not.
_FLAGS = {
    "is_transposed": (False, "are transposed"),
    "is_concatenated": (True, "have gate and up interleaved"),
    "has_bias": (False, "have biases"),
}
