"""Experts in one parameter are quantized as the Linear modules that a checkpoint has of them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from families import batch, gpt_oss, mixtral, qwen3_moe
from peer import assert_same_tensors, preset, quantized
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from inlay import Calibration, ConfigurationError, Recipe, StatisticsError
from inlay.nodes.quantize import fold_weight
from inlay.recipe import Plan, make_observer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # what Dynamo and the peer warn of is theirs
]

SIZES = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1}
HEADS = {"head_dim": 32, "moe_intermediate_size": 128}
IGNORED = ["lm_head", "re:.*mlp[.]gate$"]
EXPERTS = "model.layers.0.mlp.experts"
PRESETS = ["W4A16", "W8A8", "FP8_DYNAMIC", "NVFP4A16"]


def model_of(family: Any) -> Any:
    return family(**{**SIZES, **(HEADS if family is not mixtral else {})}).to(torch.bfloat16)


def recipe_of(name: str, **fields: Any) -> Recipe:
    return Recipe.from_preset(name, **{"ignore": IGNORED, **fields})


def calibrated(model: Any, recipe: Recipe) -> Calibration:
    calibration = Calibration(model, recipe, compiler="eager", progress=False)
    calibration.finalize()
    return calibration


def weight_of(model: Any, number: int, projection: str) -> torch.Tensor:
    experts = model.get_submodule(EXPERTS)
    if projection == "down_proj":
        return experts.down_proj[number]
    return experts.gate_up_proj[number].chunk(2)[projection == "up_proj"]


@pytest.mark.parametrize("family", [mixtral, qwen3_moe])
@pytest.mark.parametrize("name", ["W4A16", "FP8_DYNAMIC"])
def test_each_has_the_qparams_of_its_own_weight(family: Any, name: str) -> None:
    model, recipe = model_of(family), recipe_of(name)
    found = calibrated(model, recipe).qparams
    assert found is not None
    (scheme,) = recipe.config.config_groups.values()
    for number in range(4):
        for projection in ("gate_proj", "up_proj", "down_proj"):
            observer = make_observer("weight", scheme.weights)
            expected = observer(weight_of(model, number, projection)).get_qparams()
            own = found[f"{EXPERTS}.{number}.{projection}.weight"]
            assert torch.equal(own["scale"], expected["scale"])


@pytest.mark.parametrize(
    ("family", "dtype"), [(mixtral, torch.bfloat16), (qwen3_moe, torch.float32)]
)
def test_the_finalized_graph_has_the_quantized_weights(family: Any, dtype: torch.dtype) -> None:
    """Compiled in float32, transformers multiplies with an op of its own."""
    model = model_of(family).to(dtype)
    calibration = calibrated(model, recipe_of("W4A16"))
    one = batch(model)
    with torch.no_grad():
        found = torch.compile(model, backend=calibration.backend)(**one).logits
        plain = model(**one).logits
        module = calibration.quantized_module(**one, use_cache=False)
        exported = module(**one, use_cache=False).logits
        for slot in calibration.plan.weight_slots():
            weight = calibration.plan.modules_of(model)[slot.module].weight
            weight.data.copy_(fold_weight(weight, slot.args, calibration.qparams[slot.name]))
        expected = model(**one).logits  # the experts of the model share their memory
    assert torch.equal(found, expected)
    assert torch.equal(exported, expected)
    assert not torch.equal(plain, expected)


@pytest.mark.parametrize("name", PRESETS)
def test_the_checkpoint_is_that_of_llm_compressor(name: str, tmp_path: Path) -> None:
    """In float32: the experts that the peer takes out of a model are float32 in any case."""
    model = model_of(qwen3_moe).float()
    calibrated(model, recipe_of(name)).save(tmp_path / "own", report=False)
    quantized(model, preset(name, ignore=IGNORED), None, save_to=tmp_path / "peer")
    own, peer = (load_file(tmp_path / who / "model.safetensors") for who in ("own", "peer"))
    assert f"{EXPERTS}.3.up_proj.weight_scale" in own
    assert_same_tensors(own, peer)


@pytest.mark.parametrize("family", [mixtral, qwen3_moe])
@pytest.mark.parametrize("name", ["W4A16", "FP8_DYNAMIC"])
def test_transformers_loads_what_the_graph_has(family: Any, name: str, tmp_path: Path) -> None:
    model = model_of(family)
    calibration = calibrated(model, recipe_of(name))
    calibration.save(tmp_path / "out", report=False)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    one = batch(model)
    with torch.no_grad():
        found = loaded.eval()(**one).logits  # it unpacks weights when it first runs
        expected = torch.compile(model, backend=calibration.backend)(**one).logits
    lost = float((expected - model(**one).logits).abs().max())
    assert float((found - expected).abs().max()) < 0.5 * lost
    for name, stack in calibration.plan.stacks.items():
        folded = calibration._bindings.weights.folded_stack(stack, calibration.qparams)
        assert torch.equal(loaded.get_parameter(name), folded), name


def test_patterns_speak_of_single_experts() -> None:
    model = model_of(mixtral)
    ignored = Plan(model, recipe_of("W8A8", ignore=[*IGNORED, "re:.*experts.*"]))
    assert not ignored.stacks
    assert not any("experts" in name for name in ignored.slots)
    only = Plan(model, recipe_of("W8A8", targets=[r"re:.*experts[.]\d+[.].*_proj"], ignore=[]))
    assert len(only.slots) == 4 * 3 * 2
    assert list(only.stacks) == [f"{EXPERTS}.gate_up_proj", f"{EXPERTS}.down_proj"]


@pytest.mark.parametrize("some", ["re:.*experts[.]2[.].*", "re:.*experts.*down_proj"])
def test_some_experts_alone_are_refused(some: str) -> None:
    with pytest.raises(ConfigurationError, match=r"unlike .*experts.0.gate_proj; a server runs"):
        Plan(model_of(mixtral), recipe_of("W8A8", ignore=[*IGNORED, some]))


@pytest.mark.parametrize(
    ("family", "name", "fields", "reason"),
    [
        (mixtral, "FP8", {}, "scales found beforehand"),
        (mixtral, "W4A16", {"weights": {"observer": "imatrix_mse"}}, "weighs the channels"),
        (gpt_oss, "W4A16", {}, "are transposed and have gate and up interleaved and have biases"),
    ],
)
def test_what_is_left_alone_is_said_with_its_reason(
    family: Any, name: str, fields: dict[str, Any], reason: str
) -> None:
    plan = Plan(model_of(family), recipe_of(name, ignore=["lm_head"], **fields))
    assert not any(".experts." in slot for slot in plan.slots)
    assert reason in plan.experts_left[EXPERTS]


def test_explain_shows_a_range_of_experts() -> None:
    calibration = Calibration(model_of(mixtral), recipe_of("W8A8"), compiler="eager")
    shown = calibration.explain()
    assert f"{EXPERTS}.0 … 3.gate_proj.weight " in shown
    assert f"{EXPERTS}.1.gate_proj" not in shown
    assert shown.startswith(f"{len(calibration.plan.slots)} slots")


def test_a_broken_expert_is_not_lost_when_saving(tmp_path: Path) -> None:
    model = model_of(mixtral)
    model.get_parameter(f"{EXPERTS}.down_proj").data[2, 0, 0] = torch.nan
    calibration = Calibration(model, recipe_of("FP8_DYNAMIC"), compiler="eager", progress=False)
    with pytest.raises(StatisticsError, match=r"experts.2.down_proj.weight"):
        calibration.finalize()
    calibration.finalize(accept={"not_finite"})
    with pytest.raises(StatisticsError, match=r"experts.2.down_proj would stay in full precision"):
        calibration.save(tmp_path / "out", report=False)
