"""Experts are equalized each by itself: rows of its up weight, columns of its down weight."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from families import batch, deepseek_v3, mixtral, qwen3_moe
from hypothesis import given
from hypothesis import strategies as st
from peer import assert_same_tensors
from profiles import examples
from routed import routed_rows
from safetensors.torch import load_file
from torch.func import functional_call
from transformers import AutoModelForCausalLM

from inlay import Calibration, Recipe, StoredStatistics, calibrate
from inlay.engine.calibrate import requantize
from inlay.equalization.parameters import EqualizedParameters

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # what Dynamo warns of is its own
]

EXPERTS = "model.layers.0.mlp.experts"
FAMILIES = {
    "mixtral": (mixtral, {}),
    "qwen3_moe": (qwen3_moe, {}),
    "deepseek_v3": (deepseek_v3, {"first_k_dense_replace": 0}),
}


def recipe_of(strength: Any, name: str = "FP8", **fields: Any) -> Recipe:
    ignore = ["lm_head", "re:.*[.]gate$"]
    return Recipe.from_preset(name, ignore=ignore, equalize=strength, **fields)


def model_of(family: str = "mixtral") -> Any:
    """A model whose experts have a few up projections that are much larger than others."""
    make, sizes = FAMILIES[family]
    model = make(num_hidden_layers=1, **sizes)
    with torch.no_grad():
        rows = model.get_parameter(f"{EXPERTS}.gate_up_proj")
        rows.mul_(torch.where(torch.rand(*rows.shape[:2], 1) < 0.1, 30.0, 1.0))
    return model


def data_of(model: Any, count: int = 2) -> list[dict[str, Any]]:
    found = [batch(model, index, rows=4) for index in range(count)]
    found[0]["attention_mask"][1, 3:] = 0
    return found


def calibrated(model: Any, recipe: Recipe, data: Any = None) -> Calibration:
    calibration = Calibration(model, recipe, compiler="eager", progress=False)
    for one in data_of(model) if data is None else data:
        calibration.observe(**one)
    calibration.finalize()
    return calibration


def scales_of(calibration: Calibration) -> dict[str, torch.Tensor]:
    """The scales of experts, by the Linear that reads the scaled value."""
    chosen = calibration.equalization._scales
    return {g.name: s.values.float() for g, s in chosen.items() if g.index is not None}


@given(
    family=st.sampled_from(sorted(FAMILIES)), strength=st.one_of(st.floats(0, 1), st.just("auto"))
)
@examples(4)
@torch.no_grad()
def test_the_equalized_experts_compute_what_the_experts_compute(family: str, strength: Any) -> None:
    """In float64, which grouped products do not take: scales are those of a run in float32."""
    torch._dynamo.reset()
    model = model_of(family)
    calibration = calibrated(model, recipe_of(strength))
    equalization = calibration.equalization
    of_experts = {g: s.values for g, s in equalization._scales.items() if g.index is not None}
    assert len(of_experts) == 4
    wide = copy.deepcopy(model).double()
    wide.set_experts_implementation("batched_mm")
    parameters = EqualizedParameters(wide)
    parameters.scale(of_experts, lambda reader: calibration.plan.weights[reader].parameter)
    assert parameters.changed == {f"{EXPERTS}.gate_up_proj", f"{EXPERTS}.down_proj"}
    scaled = {name: parameters.of(value) for name, value in wide.named_parameters()}
    before = wide.get_parameter(f"{EXPERTS}.gate_up_proj")
    assert not torch.allclose(scaled[f"{EXPERTS}.gate_up_proj"], before)
    one = data_of(model)[0]
    plain, equalized = (functional_call(wide, given, (), one)[0] for given in ({}, scaled))
    assert float((plain - equalized).norm() / plain.norm()) < 1e-9


@pytest.mark.parametrize("family", FAMILIES)
def test_scales_are_those_of_the_rows_and_the_weight_of_each_expert(family: str) -> None:
    model = model_of(family)
    calibration = calibrated(model, recipe_of(0.6))
    rows = routed_rows(model, data_of(model))
    found = scales_of(calibration)
    for number in range(4):
        name = f"{EXPERTS}.{number}.down_proj"
        own = torch.cat(rows[name])
        reached = own.abs().amax(0)
        reached = reached.clamp(min=float(reached.max()) * 1e-5)
        columns = calibration.graphs.weights.of_module(name).abs().amax(0)
        torch.testing.assert_close(found[name], reached**0.6 / columns**0.4)
        scale = calibration.qparams[f"{name}.input"]["scale"]
        torch.testing.assert_close(float(scale), float((own / found[name]).abs().max()) / 448)
        views = {
            projection: calibration.plan.weights[f"{EXPERTS}.{number}.{projection}_proj"]
            for projection in ("gate", "up", "down")
        }
        weights = {k: calibration.graphs.weights.original(view) for k, view in views.items()}
        scaled = {k: calibration.graphs.weights.plain(view) for k, view in views.items()}
        assert torch.equal(scaled["gate"], weights["gate"])
        torch.testing.assert_close(scaled["up"], weights["up"] / found[name].unsqueeze(1))
        torch.testing.assert_close(scaled["down"], weights["down"] * found[name])


def test_an_expert_without_tokens_stays_as_it_is() -> None:
    model = model_of()
    one = {"input_ids": torch.tensor([[1]]), "attention_mask": torch.ones(1, 1)}
    calibration = calibrated(model, recipe_of(0.6, "FP8_DYNAMIC"), [one])
    reached = {name for name in routed_rows(model, [one]) if name.endswith("down_proj")}
    assert len(reached) == 2
    assert scales_of(calibration).keys() == reached
    down = calibration.equalization.parameters.named(f"{EXPERTS}.down_proj")
    for number, weight in enumerate(model.get_parameter(f"{EXPERTS}.down_proj")):
        is_scaled = f"{EXPERTS}.{number}.down_proj" in reached
        assert torch.equal(down[number], weight) != is_scaled


@pytest.mark.parametrize("name", ["FP8", "FP8_DYNAMIC"])
def test_graph_and_checkpoint_have_the_equalized_experts(name: str, tmp_path: Path) -> None:
    model = model_of("qwen3_moe").to(torch.bfloat16)
    calibration = calibrated(model, recipe_of(0.6, name))
    calibration.save(tmp_path / "out", report=False)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    one = data_of(model)[0]
    with torch.no_grad():
        loaded(**one)  # it unpacks weights when it first runs
        graph = torch.compile(model, backend=calibration.backend)(**one).logits
        plain = model(**one).logits
    assert float((graph - plain).norm() / plain.norm()) < 0.1
    for stack_name in calibration.plan.stacks:
        folded = calibration.graphs.bindings.weights.folded(stack_name, calibration.qparams)
        assert torch.equal(loaded.get_parameter(stack_name), folded)
        assert not torch.allclose(folded, model.get_parameter(stack_name), rtol=0.2, atol=0.02)


def test_observers_that_have_to_see_scaled_inputs_see_them_in_a_second_run() -> None:
    model = model_of()
    data = data_of(model)
    recipe = recipe_of(0.6, inputs={"observer": "minmax"})
    options = {"held_out": 0, "compiler": "eager", "progress": False}
    calibration = calibrate(model, recipe, data, **options)
    rows = routed_rows(model, data)
    found = scales_of(calibration)
    for number in range(4):
        slot = calibration.plan.slots[f"{EXPERTS}.{number}.down_proj.input"]
        observer = slot.make_observer()
        for own in rows[slot.module]:
            observer(own / found[slot.module])
        known = calibration.statistics.of(slot)
        torch.testing.assert_close(known.tensors["max_vals"], observer.max_vals)


def test_requantized_to_another_strength_it_is_as_if_calibrated(tmp_path: Path) -> None:
    model = model_of()
    calibrated(model, recipe_of(0.8)).save(tmp_path / "first", report=False)
    stored = StoredStatistics.load(tmp_path / "first")
    requantize(model, recipe_of(0.5), stored, progress=False).save(tmp_path / "again", report=False)
    calibrated(model, recipe_of(0.5)).save(tmp_path / "expected", report=False)
    found, expected = (
        load_file(tmp_path / folder / "model.safetensors") for folder in ("again", "expected")
    )
    assert_same_tensors(found, expected)


def test_explain_says_which_experts_are_equalized_and_which_are_not() -> None:
    shown = calibrated(model_of(), recipe_of(0.6)).explain()
    assert f"{EXPERTS}.down_proj: equalized with strength 0.6; the largest channel" in shown
    assert f"{EXPERTS}.gate_up_proj: not equalized: it is indexed by values" in shown
    shared = calibrated(model_of(), recipe_of(0.6, experts="layer")).explain()
    assert f'{EXPERTS}.down_proj: not equalized: experts="layer" gives experts the range' in shared
