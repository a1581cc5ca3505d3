"""The layouts of weights: which modules multiply by a matrix, and where they keep it."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from inlay.model.weight import Weight

__all__ = ["KINDS", "LAYOUTS", "PRODUCTS", "Layout", "layout_of"]

# The kinds of ops that read a weight, and those of them that multiply by it.
KINDS = ("linear", "embedding", "grouped")
PRODUCTS = ("linear", "grouped")


@dataclass(frozen=True)
class Layout:
    """How the modules of some classes keep their weights.

    :param kind: the kind of op that reads the weights, of `KINDS`
    :param recognizes: tells from its name and the module itself whether it has this layout
    :param weights: describes the weights of a module of that name
    :param problem: says why the weights of a module are left alone; None if they are not
    """

    kind: str
    recognizes: Callable[[str, nn.Module], bool]
    weights: Callable[[str, Any], Iterator[Weight]]
    problem: Callable[[Any], str | None] = lambda _: None


def layout_of(name: str, module: nn.Module) -> Layout | None:
    """Return the layout of a module; None if it is not known to have weights."""
    return next((layout for layout in LAYOUTS if layout.recognizes(name, module)), None)


def _own_weight(name: str, module: Any) -> Iterator[Weight]:
    outputs, inputs = module.weight.shape
    yield Weight(
        module=name,
        parameter=_inside(name, "weight"),
        shape=(outputs, inputs),
        bias=_inside(name, "bias") if getattr(module, "bias", None) is not None else None,
    )


def _transposed_weight(name: str, module: Any) -> Iterator[Weight]:
    inputs, outputs = module.weight.shape
    yield Weight(
        module=name,
        parameter=_inside(name, "weight"),
        shape=(outputs, inputs),
        transposed=True,
        bias=_inside(name, "bias"),
    )


def _is_conv1d(_: str, module: nn.Module) -> bool:
    """Tell whether a module is a Conv1D of transformers, without importing transformers."""
    known = ("transformers.pytorch_utils", "Conv1D")
    return any((cls.__module__, cls.__name__) == known for cls in type(module).__mro__)


def _has_experts(name: str, module: nn.Module) -> bool:
    parameters = module.parameters(recurse=False)
    return name.endswith("experts") and any(parameter.dim() == 3 for parameter in parameters)


def _weights_of_experts(name: str, module: Any) -> Iterator[Weight]:
    """Describe a Linear for each projection of each expert, named as checkpoints name it."""
    transposed = bool(module.is_transposed)
    for parameter, projections in _projections(module).items():
        count, rows, columns = module.get_parameter(parameter).shape
        if transposed:
            rows, columns = columns, rows
        size = rows // len(projections)
        for index in range(count):
            for number, projection in enumerate(projections):
                cut = range(number * size, (number + 1) * size)
                if not module.is_concatenated:
                    cut = range(number, rows, len(projections))
                yield Weight(
                    module=f"{name}.{index}.{projection}",
                    parameter=f"{name}.{parameter}",
                    shape=(size, columns),
                    index=index,
                    rows=cut if len(projections) > 1 else None,
                    transposed=transposed,
                    bias=f"{name}.{parameter}_bias" if module.has_bias else None,
                )


def _projections(module: nn.Module) -> Mapping[str, tuple[str, ...]]:
    """Map the parameters of experts to the projections that their rows hold."""
    if getattr(module, "has_gate", True):
        return {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
    return {"up_proj": ("up_proj",), "down_proj": ("down_proj",)}


def _problem_with_experts(module: nn.Module) -> str | None:
    flags = {flag: getattr(module, flag, None) for flag in _FLAGS}
    if None in flags.values():
        return "it does not say how its experts are laid out"
    odd = [words for flag, (usual, words) in _FLAGS.items() if flags[flag] != usual]
    if odd:
        return f"its experts {' and '.join(odd)}"
    own = dict(module.named_parameters(recurse=False))
    if set(own) != set(_projections(module)) or any(each.dim() != 3 for each in own.values()):
        return f"it has the parameters {', '.join(own)}"
    return None


# What transformers says of a layout: the supported value, and a description of other values.
_FLAGS = {
    "is_transposed": (False, "are transposed"),
    "is_concatenated": (True, "have gate and up interleaved"),
    "has_bias": (False, "have biases"),
}


def _inside(name: str, parameter: str) -> str:
    return f"{name}.{parameter}" if name else parameter


LAYOUTS: tuple[Layout, ...] = (
    Layout("linear", lambda _, module: isinstance(module, nn.Linear), _own_weight),
    Layout("embedding", lambda _, module: isinstance(module, nn.Embedding), _own_weight),
    Layout(
        "linear",
        _is_conv1d,
        _transposed_weight,
        lambda _: "transformers loads quantized weights of Linear and Embedding modules alone",
    ),
    Layout("grouped", _has_experts, _weights_of_experts, _problem_with_experts),
)
