"""Models that quantize by hooks, and eager observers: what graphs are held against."""

import copy
from typing import Any

import torch
from torch import nn

from inlay import Calibration, Recipe
from inlay.checking.hooks import Hooks
from inlay.nodes.quantize import QuantizeDequantize, fold_weight
from inlay.observers import Observer
from inlay.recipe import Plan


class Inputs(Hooks):
    """Observers attached to the inputs of every Linear that the recipe does not ignore."""

    def __init__(self, model: nn.Module, recipe: Recipe) -> None:
        super().__init__(model, Plan(model, recipe))

    @property
    def observers(self) -> dict[str, Observer]:
        return {name: seen.observer for name, seen in self.seen.items()}


def expected_qparams(
    model: nn.Module, recipe: Recipe, batches: list[dict], *, count_padding: bool = True
) -> dict:
    inputs = Inputs(model, recipe)
    with torch.no_grad():
        for one in batches:
            model(**one) if count_padding else inputs.run_without_padding(one)
    inputs.remove()
    return {name: observer.get_qparams() for name, observer in inputs.observers.items()}


def quantized_copy(model: nn.Module, qparams: dict, recipe: Recipe) -> nn.Module:
    """The model with folded weights, whose Linear modules quantize their inputs, by hooks."""
    (scheme,) = recipe.config.config_groups.values()
    model = copy.deepcopy(model)
    modules = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    for name, module in modules.items():
        weight, inputs = (qparams.get(f"{name}.{part}") for part in ("weight", "input"))
        if weight is not None:
            folded = fold_weight(module.weight, scheme.weights, weight)
            module.weight = nn.Parameter(folded, requires_grad=False)
        if inputs is not None:
            target = QuantizeDequantize(scheme.input_activations, ("scale", "zero_point"))
            own = [inputs[key] for key in target.names]
            module.register_forward_pre_hook(
                lambda _, args, target=target, own=own: (target(args[0], *own), *args[1:])
            )
    return model


def assert_same_qparams(found: dict, expected: dict) -> None:
    assert expected.keys() <= found.keys()
    for name, qparams in expected.items():
        for key, value in qparams.items():
            own = found[name][key]
            assert (own is None) == (value is None)
            if value is not None:
                assert torch.equal(own.float(), value.float()), (name, key)


def assert_equal_qparams(found: dict, expected: dict) -> None:
    """The same qparams for the same slots."""
    assert found.keys() == expected.keys()
    assert_same_qparams(found, expected)


def assert_eager_statistics(
    calibration: Calibration, model: nn.Module, batches: list[tuple[Any, ...]]
) -> None:
    """The statistics of the calibration are those of eager observers on the same batches."""
    inputs = Inputs(model, calibration.recipe)
    with torch.no_grad():
        for one in batches:
            model(*one)
    inputs.remove()
    for name, expected in inputs.observers.items():
        state = calibration.statistics.snapshot().get(name)
        assert (state is not None) == expected.has_statistics, name
        if state is not None:
            found = state.observer()
            assert torch.equal(found.min_vals, expected.min_vals), name
            assert torch.equal(found.max_vals, expected.max_vals), name
