"""The names under which transformers saves the weights of a model."""

import torch
from torch import nn

from inlay.model.weight import Stack
from inlay.transformers_private import as_saved

__all__ = ["saved_names"]


def saved_names(model: nn.Module, stack: Stack) -> dict[str, str]:
    """Return the names that a checkpoint has for the weights of a stack, by module.

    Empty if transformers does not save a matrix for each.
    """
    # The number of a weight in place of its rows shows under which name they are saved. There are
    # two columns because transformers drops a dimension of size one.
    outputs = sum(weight.shape[0] for weight in stack.by_index[0])
    sizes = (2, outputs) if stack.weights[0].transposed else (outputs, 2)
    marked = torch.empty(len(stack.by_index), *sizes, dtype=torch.int64)
    for number, weight in enumerate(stack.weights):
        weight.read(marked).fill_(number)
    places = {
        int(tensor.flatten()[0]): name.removesuffix(".weight")
        for name, tensor in as_saved(model, {stack.name: marked}).items()
        if tensor.dim() == 2
    }
    if not places.keys() >= set(range(len(stack.weights))):
        return {}
    return {weight.module: places[number] for number, weight in enumerate(stack.weights)}
