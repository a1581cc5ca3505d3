"""Models published in few bits, read as if they were not, in memory and streamed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import gpt_oss, llama, qwen3_moe
from folders import assert_same_folder, tensors_in
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    CompressedTensorsConfig,
    FineGrainedFP8Config,
    Mxfp4Config,
)

import inlay
from inlay.checkpoint.files.dequantized import open_files
from inlay.checkpoint.loading import load_as_stored, load_model
from inlay.checkpoint.stored_model import StoredModel
from inlay.errors import CheckpointError, ConfigurationError

Write = Callable[[Path], Any]


def rewrite(folder: Path, tensors: dict[str, torch.Tensor], quantization: dict[str, Any]) -> None:
    """Replace the tensors of a model, and add the config of their quantization."""
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config))


def fp8(folder: Path, model: Any = None) -> FineGrainedFP8Config:
    """Write FP8 weights with a scale for each block of 16 x 16, as DeepSeek does of 128 x 128."""
    (model or qwen3_moe()).bfloat16().save_pretrained(folder)
    written: dict[str, torch.Tensor] = {}
    for name, tensor in tensors_in(folder).items():
        written[name] = tensor
        if tensor.dim() == 2 and "proj" in name:
            rows, columns = tensor.shape
            blocks = tensor.float().reshape(rows // 16, 16, columns // 16, 16)
            scale = blocks.abs().amax((1, 3)) / 448
            written[name] = (blocks / scale[:, None, :, None]).reshape(rows, columns)
            written[name] = written[name].to(torch.float8_e4m3fn)
            written[f"{name}_scale_inv"] = scale
    settings = {
        "quant_method": "fp8",
        "weight_block_size": [16, 16],
        "activation_scheme": "dynamic",
    }
    rewrite(folder, written, settings)
    return FineGrainedFP8Config(dequantize=True, weight_block_size=(16, 16))


def mxfp4(folder: Path) -> Mxfp4Config:
    """Write random blocks of four bits, with exponents around those of small weights."""
    gpt_oss().bfloat16().save_pretrained(folder)
    written: dict[str, torch.Tensor] = {}
    generator = torch.Generator().manual_seed(0)
    for name, tensor in tensors_in(folder).items():
        if tensor.dim() != 3:
            written[name] = tensor
            continue
        experts, inputs, outputs = tensor.shape
        shape = (experts, outputs, inputs // 32, 16)
        written[f"{name}_blocks"] = torch.randint(0, 256, shape, generator=generator).byte()
        written[f"{name}_scales"] = torch.randint(118, 124, shape[:-1], generator=generator).byte()
    rewrite(folder, written, {"quant_method": "mxfp4"})
    return Mxfp4Config(dequantize=True)


def compressed(scheme: str, **weights: Any) -> Write:
    def write(folder: Path) -> CompressedTensorsConfig:
        sizes = {"hidden_size": 64, "intermediate_size": 64}
        if scheme == "FP8_BLOCK":
            sizes = dict.fromkeys(sizes, 128)
        model = llama(**sizes).bfloat16()
        recipe = inlay.Recipe.from_preset(scheme, targets=["re:.*_proj$"], weights=weights)
        inlay.calibrate(model, recipe, progress=False).save(folder, report=False)
        return CompressedTensorsConfig(dequantize=True)

    return write


SOURCES: dict[str, Write] = {
    "fp8": fp8,
    "mxfp4": mxfp4,
    "W8A8": compressed("W8A8"),
    "W4A16": compressed("W4A16", group_size=32),
    "NVFP4A16": compressed("NVFP4A16"),
    "FP8_BLOCK": compressed("FP8_BLOCK"),
}


@pytest.mark.filterwarnings("ignore:.*quantization_config.*:UserWarning")
@pytest.mark.filterwarnings("ignore:.*stay in full precision:UserWarning")
@pytest.mark.parametrize("kind", SOURCES)
def test_a_source_is_its_dequantized_model(kind: str, tmp_path: Path) -> None:
    """Transformers dequantizes it to the same bits, and both are quantized to the same files."""
    source = tmp_path / "source"
    reference = AutoModelForCausalLM.from_pretrained(
        source, quantization_config=SOURCES[kind](source), dtype="auto"
    )
    found = load_model(source)
    expected = {name: each for name, each in reference.named_parameters() if "weight_" not in name}
    assert {name for name, _ in found.named_parameters()} == expected.keys()
    for name, parameter in found.named_parameters():
        assert parameter.dtype == expected[name].dtype == torch.bfloat16, name
        assert torch.equal(parameter, expected[name]), name
    assert getattr(found.config, "quantization_config", None) is None
    # Fingerprints are those of stored tensors: dequantized, all would be in memory at once.
    assert open_files(source).fingerprints().keys() == tensors_in(source).keys()
    recipe = inlay.Recipe.from_preset("W8A8")
    out = tmp_path / "streamed"
    inlay.stream(source, recipe, out=out, report=False, progress=False)
    inlay.calibrate(found, recipe, progress=False).save(tmp_path / "in-memory", report=False)
    assert_same_folder(out, tmp_path / "in-memory")


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("is_packed", [False, True])
def test_tensors_beyond_the_model_are_copied(
    tmp_path: Path, is_streamed: bool, is_packed: bool
) -> None:
    """Layers that predict further tokens are at the end of the files of DeepSeek and others."""
    source, out = tmp_path / "source", tmp_path / "out"
    fp8(source, llama())
    with open_files(source).reading() as read:
        weight = read("model.layers.0.mlp.up_proj.weight")
    tensors = tensors_in(source)
    parts = {name: tensors[f"model.layers.0.mlp.{name}"].clone() for name in UP}
    quantization = json.loads((source / "config.json").read_text())["quantization_config"]
    if is_packed:
        extra = {f"model.layers.2.mlp.{name}": part for name, part in parts.items()}
    else:
        extra = {"model.layers.2.mlp.up_proj.weight": weight}
    extra["mtp.norm.weight"] = torch.arange(8.0)
    rewrite(source, {**tensors, **extra}, quantization)
    recipe = inlay.Recipe.from_preset("W8A8")
    with pytest.warns(UserWarning, match=r"does not use 2 of .*They are copied unchanged into"):
        model = StoredModel.open(source) if is_streamed else load_model(source)
    if isinstance(model, StoredModel):
        inlay.stream(model, recipe, out=out, report=False, progress=False)
    else:
        inlay.calibrate(model, recipe, progress=False).save(out, report=False)
    found = tensors_in(out)
    assert torch.equal(found["model.layers.2.mlp.up_proj.weight"], weight)
    assert torch.equal(found["mtp.norm.weight"], torch.arange(8.0))
    ignored = json.loads((out / "config.json").read_text())["quantization_config"]["ignore"]
    assert {r"re:model\.layers\.2($|[.].*)", r"re:mtp\.norm($|[.].*)"} <= set(ignored)
    index = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    assert index.keys() == found.keys()
    assert type(load_as_stored(out)).__name__ == "LlamaForCausalLM"


def test_a_source_without_safetensors_leaves_nothing_over(tmp_path: Path) -> None:
    model = llama()
    model.config.architectures = ["LlamaForCausalLM"]
    model.config.save_pretrained(tmp_path / "source")
    (tmp_path / "source" / "pytorch_model.bin").touch()
    model.config.name_or_path = model.name_or_path = str(tmp_path / "source")
    run = inlay.calibrate(model, inlay.Recipe.from_preset("W8A8"), progress=False)
    assert (run.save(tmp_path / "out", report=False) / "model.safetensors").is_file()


UP = ("up_proj.weight", "up_proj.weight_scale_inv")


@pytest.mark.parametrize(("rows", "columns"), [(20, 36), (16, 32), (5, 7), (1040, 3)])
def test_blocks_at_the_edge_are_smaller(rows: int, columns: int, tmp_path: Path) -> None:
    """Transformers refuses these; DeepSeek has them."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(rows, columns, generator=generator).to(torch.float8_e4m3fn)
    scale = torch.rand(-(-rows // 16), -(-columns // 16), generator=generator)
    tmp_path.joinpath("config.json").write_text('{"dtype": "float32"}')
    settings = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    rewrite(tmp_path, {"a.weight": weight, "a.weight_scale_inv": scale}, settings)
    files = open_files(tmp_path)
    assert files.tensors.keys() == {"a.weight"}
    with files.reading() as read:
        found = read("a.weight")
    for row, column in ((0, 0), (rows - 1, columns - 1), (rows // 2, columns - 1)):
        expected = weight[row, column].float() * scale[row // 16, column // 16]
        assert found[row, column] == expected
    rewrite(tmp_path, {"a.weight": weight, "a.weight_scale_inv": scale[:, :0]}, settings)
    with pytest.raises(CheckpointError, match=r"a.weight has the shape .* and scales of"):
        open_files(tmp_path)


def test_other_formats_are_refused(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    rewrite(tmp_path, tensors_in(tmp_path), {"quant_method": "gptq", "bits": 4})
    with pytest.raises(ConfigurationError, match="quantized already; calibrate the model it was"):
        load_model(tmp_path)
