"""Experts in one parameter are quantized as the Linear modules that a checkpoint has of them."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from families import (
    batch,
    deepseek_v3,
    glm4_moe,
    gpt_oss,
    granite_moe,
    mixtral,
    olmoe,
    qwen3_moe,
)
from peer import assert_same_tensors, batches, preset, quantized
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from inlay import Calibration, ConfigurationError, Recipe, StatisticsError
from inlay.nodes.quantize import QuantizeDequantize, fold_weight
from inlay.recipe import Plan, make_observer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # what Dynamo and the peer warn of is theirs
]

SIZES = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1}
HEADS = {"head_dim": 32, "moe_intermediate_size": 128}
LATE = {
    "moe_intermediate_size": 128,
    "first_k_dense_replace": 0,
    "num_nextn_predict_layers": 0,  # the peer would look for them in the original checkpoint
}
IGNORED = ["lm_head", "re:.*mlp[.]gate$"]
EXPERTS = "model.layers.0.mlp.experts"
PRESETS = ["W4A16", "W8A8", "FP8_DYNAMIC", "NVFP4A16"]


def model_of(family: Any) -> Any:
    of_family = {mixtral: {}, olmoe: {}, granite_moe: {}, deepseek_v3: LATE, glm4_moe: LATE}
    return family(**{**SIZES, **of_family.get(family, HEADS)}).to(torch.bfloat16)


def recipe_of(name: str, **fields: Any) -> Recipe:
    return Recipe.from_preset(name, **{"ignore": IGNORED, **fields})


def calibrated(model: Any, recipe: Recipe, data: Sequence[Any] = ()) -> Calibration:
    calibration = Calibration(model, recipe, compiler="eager", progress=False)
    for one in data:
        calibration.observe(**one)
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
            weight = calibration.graphs.weights.of_module(slot.module)
            weight.copy_(fold_weight(weight, slot.args, calibration.qparams[slot.name]))
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


@pytest.mark.parametrize("name", ["FP8", "NVFP4"])
def test_the_finalized_graph_quantizes_the_inputs_of_each_expert(name: str) -> None:
    """As a loop over experts does that has the scales and the weight of each."""
    model = model_of(qwen3_moe).float()
    recipe = recipe_of(name, targets=[r"re:.*experts[.]\d+[.].*_proj"], ignore=[])
    data = batches(2, padded=False)
    calibration = calibrated(model, recipe, data)
    found = calibration.qparams
    assert found is not None
    scales = [found[f"{EXPERTS}.{n}.down_proj.input"] for n in range(4)]
    key = "scale" if name == "FP8" else "global_scale"
    assert len({float(each[key]) for each in scales}) == 4

    def looped(rows: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor, **_: Any) -> Any:
        projections = ["down_proj"] if weight.shape[1:] == (128, 128) else ["gate_proj", "up_proj"]
        outputs, start = [], 0
        for number, end in enumerate(offs.tolist()):
            names = [f"{EXPERTS}.{number}.{projection}" for projection in projections]
            slot = calibration.plan.slots[f"{names[0]}.input"]
            used = slot.used_of(found)
            given = {key: value for key, value in used.items() if value is not None}
            quantize = QuantizeDequantize(slot.args, tuple(given))
            folded = []
            for one, part in zip(names, weight[number].chunk(len(names)), strict=True):
                args = calibration.plan.slots[f"{one}.weight"].args
                folded.append(fold_weight(part, args, found[f"{one}.weight"]))
            outputs.append(
                torch.mm(quantize(rows[start:end], *given.values()), torch.cat(folded).mT)
            )
            start = end
        return torch.cat(outputs)

    with torch.no_grad(), pytest.MonkeyPatch.context() as patched:
        graph = torch.compile(model, backend=calibration.backend)(**data[0]).logits
        exported = calibration.quantized_module(**data[0], use_cache=False)
        patched.setattr("transformers.integrations.moe._grouped_linear", looped)
        expected = model(**data[0]).logits
        torch.testing.assert_close(graph, expected)
        torch.testing.assert_close(exported(**data[0], use_cache=False).logits, expected)


@pytest.mark.parametrize(
    ("family", "name", "experts"),
    [
        (qwen3_moe, "FP8", "routed"),
        (qwen3_moe, "FP8", "all"),
        (qwen3_moe, "NVFP4", "routed"),
        (mixtral, "NVFP4", "routed"),
        (olmoe, "FP8", "routed"),
        (deepseek_v3, "FP8", "routed"),
        (glm4_moe, "NVFP4", "routed"),
    ],
)
def test_static_checkpoints_are_those_of_llm_compressor(
    family: Any, name: str, experts: Any, tmp_path: Path
) -> None:
    """But for the last bits of scales of inputs, as it multiplies with one expert at a time."""
    model = model_of(family).float()
    model.set_attn_implementation("eager")
    data = batches(2, padded=False)
    own_recipe = recipe_of(name, experts=experts)
    calibrated(model, own_recipe, data).save(tmp_path / "own", report=False)
    recipe = preset(name, ignore=IGNORED)
    options = {"save_to": tmp_path / "peer", "moe_calibrate_all_experts": experts == "all"}
    quantized(model, recipe, "basic", data, **options)
    own, peer = (load_file(tmp_path / who / "model.safetensors") for who in ("own", "peer"))
    if family is mixtral:  # the peer renames its experts, and transformers does not find them
        new = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
        swap = re.compile("|".join(f"(?<=[.]){old}(?=[.])" for old in new))
        own = {swap.sub(lambda found: new[found[0]], key): t for key, t in own.items()}
        own = {key.replace("block_sparse_moe", "mlp"): t for key, t in own.items()}
        peer = {key.replace("block_sparse_moe", "mlp"): t for key, t in peer.items()}
    for tensors in (own, peer):
        of_inputs = [key for key in tensors if "input" in key]
        assert of_inputs
    for key in of_inputs:
        torch.testing.assert_close(own[key], peer.pop(key))
        own.pop(key)
    assert_same_tensors(own, peer)
    found, expected = (
        json.loads((tmp_path / who / "config.json").read_text())["quantization_config"]
        for who in ("own", "peer")
    )
    assert set(found.pop("ignore")) >= set(expected.pop("ignore"))  # under both names
    assert found == expected


@pytest.mark.parametrize(
    ("name", "fields", "words"),
    [
        ("W8A8_STATIC", {}, "static INT8 inputs: use W8A8"),
        (
            "W8A8",
            {"weights": {"strategy": "tensor"}},
            "weights per tensor and inputs per token",
        ),
        (
            "FP8",
            {"weights": {"strategy": "channel"}},
            "weights per channel and inputs per tensor",
        ),
    ],
)
def test_what_no_server_runs_is_refused_before_calibrating(
    name: str, fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigurationError, match=f"vLLM does not run .*{words}"):
        Plan(model_of(mixtral), recipe_of(name, **fields))
    Plan(model_of(mixtral), recipe_of(name, ignore=["lm_head", "re:.*[.]experts[.].*"], **fields))


@pytest.mark.parametrize("family", [mixtral, qwen3_moe])
@pytest.mark.parametrize("name", ["W4A16", "FP8_DYNAMIC", "FP8"])
def test_transformers_loads_what_the_graph_has(family: Any, name: str, tmp_path: Path) -> None:
    """But for the inputs of experts: it runs them as they are, and drops their static scales."""
    model = model_of(family)
    is_static = name == "FP8"
    calibration = calibrated(model, recipe_of(name), batches(2, padded=False) if is_static else ())
    calibration.save(tmp_path / "out", report=False)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    dropped = info.pop("unexpected_keys")
    assert len(dropped) == (12 if is_static else 0)
    assert all(re.search(r"experts[.]\d[.]\w+[.]input_scale$", key) for key in dropped)
    assert not any(info.values()), info
    assert calibration.qparams is not None
    for slot in calibration.plan.activation_slots():
        if calibration.plan.is_routed(slot.module):
            del calibration.qparams[slot.name]  # the graph then leaves these inputs as they are
    one = batch(model)
    with torch.no_grad():
        found = loaded.eval()(**one).logits  # it unpacks weights when it first runs
        expected = torch.compile(model, backend=calibration.backend)(**one).logits
    lost = float((expected - model(**one).logits).abs().max())
    assert float((found - expected).abs().max()) < 0.5 * lost
    for stack_name in calibration.plan.stacks:
        folded = calibration.graphs.bindings.weights.folded(stack_name, calibration.qparams)
        assert torch.equal(loaded.get_parameter(stack_name), folded), stack_name


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
        (mixtral, "FP8", {"outputs": {"num_bits": 8, "type": "float"}}, "quantizes their outputs"),
        (gpt_oss, "W4A16", {}, "are transposed and have gate and up interleaved and have biases"),
        (granite_moe, "W4A16", {}, "GraniteMoeForCausalLM is saved with one tensor for all"),
    ],
)
def test_what_is_left_alone_is_said_with_its_reason(
    family: Any, name: str, fields: dict[str, Any], reason: str
) -> None:
    model, recipe = model_of(family), recipe_of(name, ignore=["lm_head"], **fields)
    plan = Plan(model, recipe)
    assert not any(".experts." in slot for slot in plan.slots)
    (left,) = plan.stacks_left
    assert reason in plan.stacks_left[left]
    shown = Calibration(model, recipe, compiler="eager").explain()
    assert f"{left} stays in full precision: " in shown


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
