"""Tell before calibrating whether a graph will show the product of a module with its weight."""

import copy
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

__all__ = ["SWAPS", "TRANSPOSES", "problem_with_product"]

# Ops that transpose a matrix, by themselves or if they are given its two dimensions.
TRANSPOSES = {"t", "T", "mT", "H", "mH", "adjoint"}
SWAPS = {"transpose", "swapaxes", "swapdims", "movedim", "moveaxis"}
# What may be done to the weight of a module so that its product is recognised.
_RECOGNISED = {"linear", "embedding", "permute", *TRANSPOSES, *SWAPS}
# A number of tokens that groups of many sizes divide. They take no memory.
_TOKENS = 2**10 * 3**2 * 5 * 7
_PLAIN = (nn.Linear.forward, nn.Embedding.forward)


def problem_with_product(module: nn.Module) -> str | None:
    """Say why the product of a Linear or an Embedding will not be recognised.

    A module may compute its weight, or have a `forward` that multiplies by something else. None if
    nothing speaks against it: a `forward` that does not run here may be recognised all the same.
    """
    kind = type(module).__name__
    if _computes_weight(module):
        return (
            f"the weight of {kind} is computed from other parameters on each call; remove the "
            "parametrization to have it quantized"
        )
    if type(module).forward in _PLAIN or "forward" in vars(module):
        return None
    reads = _reads_of_weight(module)
    if not reads or reads & _RECOGNISED:
        return None
    return (
        f"the forward of {kind} does not multiply by its weight as a whole, but calls "
        f"{', '.join(sorted(reads))} on it first"
    )


def _computes_weight(module: nn.Module) -> bool:
    if any("weight" in own for own in (module._parameters, module._buffers)):
        return False
    return module.weight is not module.weight or bool(module._forward_pre_hooks)


class _Done(Exception):  # noqa: N818  it stops a forward that has shown enough
    pass


class _Reads(TorchFunctionMode):
    """Takes down what functions are called with a tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.names: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_read = any(value is self.tensor for value in _leaves([args, kwargs or {}]))
        name = _name_of(func)
        if is_read and name in _RECOGNISED:
            self.names.add(name)
            raise _Done
        result = func(*args, **(kwargs or {}))
        if is_read and isinstance(result, torch.Tensor):  # and no shape or dtype
            self.names.add(name)
        return result


def _reads_of_weight(module: nn.Module) -> set[str]:
    """Return the names of the functions that a forward calls with the weight, without data."""
    probe = _without_data(module)
    weight = probe.weight
    assert isinstance(weight, torch.Tensor)
    if isinstance(module, nn.Embedding):
        value = torch.empty(1, _TOKENS, dtype=torch.long, device="meta")
    else:
        value = torch.empty(1, _TOKENS, weight.shape[-1], dtype=weight.dtype, device="meta")
    forward: Callable[..., Any] = type(module).forward
    # It stops at a recognised product, or where it needs something else than a value.
    with torch.no_grad(), _Reads(weight) as reads, suppress(Exception):
        forward(probe, value)
    names: set[str] = reads.names
    return names


def _without_data(module: nn.Module) -> nn.Module:
    """Return a copy on the meta device, so that nothing that a forward keeps reaches the module."""
    probe = object.__new__(type(module))
    state: dict[str, Any] = {
        key: copy.copy(value) if isinstance(value, (list, dict, set)) else value
        for key, value in vars(module).items()
    }
    for kept in ("_parameters", "_buffers"):
        state[kept] = {
            name: None if tensor is None else tensor.detach().to("meta")
            for name, tensor in state[kept].items()
        }
    probe.__dict__.update(state)
    return probe


def _name_of(function: Any) -> str:
    """Return the name of a function, or of the attribute that it gets."""
    getter = getattr(function, "__self__", None)
    is_getter = getattr(function, "__name__", "") == "__get__"
    return str(getattr(getter if is_getter else function, "__name__", function))


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, dict):
        yield from _leaves(list(value.values()))
    else:
        yield value
