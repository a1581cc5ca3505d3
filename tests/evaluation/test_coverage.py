"""Errors of each expert, against a loop over experts that has the scales and weights of each."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from families import batch, mixtral, qwen3_moe
from routed import PROJECTIONS, routed_rows

from inlay import Calibration, Recipe
from inlay.evaluation.compare import compare
from inlay.evaluation.summary import report_of
from inlay.nodes.quantize import QuantizeDequantize, fold_weight

pytestmark = pytest.mark.filterwarnings("ignore")  # what Dynamo warns of is its own

EXPERTS = "model.layers.0.mlp.experts"
SIZES = {"hidden_size": 64, "num_hidden_layers": 1, "intermediate_size": 64}


def padded(model: Any, index: int) -> dict[str, Any]:
    one = batch(model, index, rows=3, tokens=9)
    one["attention_mask"][0, 5:] = 0
    return one


def calibrated(model: Any, name: str, **fields: Any) -> Calibration:
    recipe = Recipe.from_preset(name, ignore=["lm_head", "re:.*[.]gate$"], **fields)
    calibration = Calibration(model, recipe, compiler="eager", progress=False)
    if calibration.plan.needs_data:
        for index in range(2):
            calibration.observe(**padded(model, index))
    calibration.finalize()
    return calibration


def expected_errors(calibration: Calibration, rows: torch.Tensor, name: str) -> list[float]:
    """The SQNR of output, weight and input of a projection."""
    plan, qparams = calibration.plan, calibration.qparams
    weight = calibration.graphs.weights.original(plan.weights[name])
    folded = fold_weight(weight, plan.slots[f"{name}.weight"].args, qparams[f"{name}.weight"])
    slot, quantized = plan.slots.get(f"{name}.input"), rows
    if slot is not None:
        given = {k: v for k, v in slot.used_of(qparams).items() if v is not None}
        # Its second dimension is that of tokens, each of which may have a scale of its own.
        quantize = QuantizeDequantize(slot.args, tuple(given))
        quantized = quantize(rows.unsqueeze(0), *given.values()).squeeze(0)
    pairs = [(F.linear(rows, weight), F.linear(quantized, folded)), (weight, folded)]
    return [decibels(*pair) for pair in [*pairs, *([(rows, quantized)] if slot else [])]]


def decibels(exact: torch.Tensor, quantized: torch.Tensor) -> float:
    exact, quantized = exact.double(), quantized.double()
    return 10 * math.log10(float(exact.square().sum() / (quantized - exact).square().sum()))


@pytest.mark.parametrize(
    ("make", "name"),
    [(mixtral, "FP8"), (mixtral, "NVFP4"), (qwen3_moe, "W8A8"), (mixtral, "NVFP4A16")],
)
def test_each_expert_has_the_errors_of_a_loop_over_experts(make: Any, name: str) -> None:
    model = make(**SIZES)
    calibration = calibrated(model, name)
    held_out = [padded(model, index) for index in (7, 8)]
    comparison = compare(model, calibration, held_out)
    found = {layer.module: layer for layer in comparison.layers}
    rows = routed_rows(model, held_out)
    for number in range(4):
        for projection in PROJECTIONS:
            module = f"{EXPERTS}.{number}.{projection}"
            layer = found[module]
            own = [layer.sqnr_db, layer.weight_sqnr_db, layer.input_sqnr_db]
            expected = expected_errors(calibration, torch.cat(rows[module]), module)
            assert own[: len(expected)] == pytest.approx(expected, abs=1e-3)
    (layer,) = report_of(calibration, comparison).experts
    worst = [min(found[f"{EXPERTS}.{n}.{p}"].sqnr_db for p in PROJECTIONS) for n in range(4)]
    assert list(layer.sqnr_db) == worst
    assert bool(layer.tokens) == (name in ("FP8", "NVFP4"))


def test_an_expert_that_no_token_reached_has_the_error_of_its_weights_alone() -> None:
    model = mixtral(**SIZES)
    calibration = calibrated(model, "W8A8")
    one = {"input_ids": torch.tensor([[1]]), "attention_mask": torch.ones(1, 1)}
    comparison = compare(model, calibration, [one])
    reached = {name.split(".")[-2] for name in routed_rows(model, [one])}
    assert len(reached) == 2  # a token goes to two experts
    (layer,) = report_of(calibration, comparison).experts
    for number, error in enumerate(layer.sqnr_db):
        assert (error is not None) == (str(number) in reached)
    weights = [e.weight_sqnr_db for e in comparison.layers if ".experts." in e.module]
    assert len(weights) == 12
    assert None not in weights
