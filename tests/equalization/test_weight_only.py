"""Activation-aware scales: weights that are quantized alone, by the same groups."""

from typing import Any

import pytest
import torch
from blocks import SIZE, Blocks, Form
from compressed_tensors.quantization import QuantizationArgs
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples
from torch import nn
from torch.func import functional_call

from inlay import Calibration, Recipe
from inlay.equalization.group import Group
from inlay.equalization.scales import Reader
from inlay.equalization.weight_only import activation_aware_scales_of
from inlay.nodes.quantize import fold_weight
from inlay.recipe import make_observer

ARGS = QuantizationArgs(num_bits=4, strategy="group", group_size=4)
GROUP = Group(readers=("a",), producers=(), shape=(12,))
magnitudes = st.lists(st.floats(0.01, 100), min_size=12, max_size=12).map(torch.tensor)
weights = st.integers(0, 9).map(
    lambda seed: torch.randn(6, 12, generator=torch.Generator().manual_seed(seed))
)


def reader(weight: torch.Tensor) -> Reader:
    return Reader(weight=weight, weight_args=ARGS, input_args=None)


def weighted_error(weight: torch.Tensor, scales: torch.Tensor, sizes: torch.Tensor) -> float:
    """The error of outputs if channels were independent and as large as this."""
    scaled = weight * scales
    qparams = make_observer("weight", ARGS)(scaled).get_qparams()
    error = (fold_weight(scaled, ARGS, qparams) / scales - weight) * sizes
    return float(error.square().sum())


@given(sizes=magnitudes, weight=weights)
def test_auto_is_never_worse_than_nothing(sizes: torch.Tensor, weight: torch.Tensor) -> None:
    found = activation_aware_scales_of(GROUP, sizes, [reader(weight)], "auto")
    before = weighted_error(weight, torch.ones(12), sizes)
    assert weighted_error(weight, found.values, sizes) <= before * (1 + 1e-4)
    # Only how channels compare matters, not how many tokens were summed.
    again = activation_aware_scales_of(GROUP, sizes * 64, [reader(weight)], "auto")
    torch.testing.assert_close(again.values, found.values)


@given(sizes=magnitudes, weight=weights)
def test_a_number_is_taken_as_it_is(sizes: torch.Tensor, weight: torch.Tensor) -> None:
    none = activation_aware_scales_of(GROUP, sizes, [reader(weight)], 0.0)
    assert torch.equal(none.values, torch.ones(12))
    whole = activation_aware_scales_of(GROUP, sizes, [reader(weight)], 1.0)
    torch.testing.assert_close(whole.values / whole.values[0], sizes / sizes[0])


def recipe(strength: Any, size: int = 4) -> Recipe:
    weights = {"observer": "memoryless_minmax", "group_size": size}
    return Recipe.from_preset("W4A16", weights=weights, equalize=strength)


def calibrated(
    model: nn.Module, strength: Any, *values: torch.Tensor, size: int = 4
) -> Calibration:
    torch._dynamo.reset()
    calibration = Calibration(model, recipe(strength, size), compiler="eager", progress=False)
    for value in values:
        calibration.observe(value)
    return calibration


@pytest.mark.slow
@given(
    form=st.builds(
        Form,
        norm=st.sampled_from(["layer", "rms", "gemma"]),
        mlp=st.sampled_from(["gated", "relu"]),
        fused=st.sampled_from(["", "row", "head"]),
    ),
    strength=st.sampled_from([0.0, 0.5, "auto"]),
)
@examples(4)
@torch.no_grad()
def test_the_model_computes_what_it_did(form: Form, strength: Any) -> None:
    model = Blocks(form).double().eval()
    x = torch.randn(2, 3, SIZE, dtype=torch.float64)
    calibration = calibrated(model, strength, x)
    calibration.finalize()
    assert len(calibration.equalization.done) == 9
    equalized = calibration.equalization.parameters
    scaled = {name: equalized.of(value) for name, value in model.named_parameters()}
    result = functional_call(model, scaled, (x,))
    assert float((result - model(x)).norm() / model(x).norm()) < 1e-9
    if strength == 0.0:
        for name, value in model.named_parameters():
            assert torch.equal(scaled[name], value)


@pytest.mark.slow
@torch.no_grad()
def test_channels_that_matter_are_kept() -> None:
    """And the finalized graph, the exported one and stored statistics agree on how."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.RMSNorm(32), nn.Linear(32, 16)).eval()
    model[0].weight[1] *= 30
    x = torch.randn(4, 6, 32, generator=torch.Generator().manual_seed(1))
    errors = {}
    for strength in (None, "auto"):
        data = [] if strength is None else [x]
        calibration = calibrated(model, strength, *data, size=32)
        calibration.finalize()
        result = torch.compile(model, backend=calibration.backend)(x)
        assert torch.equal(result, calibration.quantized_module(x)(x))
        errors[strength] = float((result - model(x)).norm() / model(x).norm())
    assert errors["auto"] < 0.9 * errors[None]
    again = Calibration.from_statistics(
        model, recipe(0.5, 32), calibration.stored(), compiler="eager", progress=False
    )
    direct = calibrated(model, 0.5, x, size=32)
    ours, theirs = again.finalize(), direct.finalize()
    for name, qparams in theirs.items():
        assert torch.equal(ours[name]["scale"], qparams["scale"])
