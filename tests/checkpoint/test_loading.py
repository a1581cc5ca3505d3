"""Loading models and tokenizers from folders and by name, without surprises."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import SIZES, bert, gpt2, llama
from safetensors.torch import load_file, save_file
from tokens import word_tokenizer
from torch import nn

import inlay
from inlay.checkpoint.loading import empty_model, find_tokenizer, load_model, load_tokenizer
from inlay.checkpoint.stored_model import StoredModel
from inlay.errors import CheckpointError, ConfigurationError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "tiny"
    llama().save_pretrained(path)
    return path


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def masked() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(**SIZES))


def classifying() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(BertConfig(**SIZES))


@pytest.mark.parametrize("build", [llama, gpt2, bert, masked, classifying])
def test_a_model_comes_back_as_it_was(build: Callable[[], nn.Module], tmp_path: Path) -> None:
    model = build()
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    loaded, empty = load_model(tmp_path), empty_model(str(tmp_path))
    assert type(loaded) is type(empty) is type(model)
    assert not loaded.training
    before, after = model.state_dict(), loaded.state_dict()
    assert before.keys() == after.keys() == empty.state_dict().keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert {parameter.device.type for parameter in empty.parameters()} == {"meta"}


def test_dtype(folder: Path) -> None:
    assert load_model(folder).dtype == torch.float32
    assert load_model(folder, dtype="bfloat16").dtype == torch.bfloat16
    assert load_model(folder, dtype=torch.float16).dtype == torch.float16
    with pytest.raises(ConfigurationError, match="no dtype 'int3'; choose one of auto, float32"):
        load_model(folder, dtype="int3")


def test_a_tokenizer(folder: Path) -> None:
    with pytest.raises(ConfigurationError, match="tiny has no tokenizer"):
        load_tokenizer(folder)
    assert find_tokenizer(folder) is None
    word_tokenizer().save_pretrained(folder)
    for load in (load_tokenizer, find_tokenizer):
        assert load(folder)("w1 w2")["input_ids"] == [1, 2]


def test_a_tokenizer_that_does_not_load_is_named_and_left_out(folder: Path) -> None:
    word_tokenizer().save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{")
    with pytest.warns(UserWarning, match=r"continuing without a tokenizer: cannot load .*tiny"):
        assert find_tokenizer(folder) is None


def refused(place: object, load: Callable[..., Any] = load_model, **options: Any) -> str:
    with pytest.raises(ConfigurationError) as caught:
        load(place, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("load", [load_model, load_tokenizer, empty_model])
def test_nothing_is_downloaded_by_surprise(load: Callable[..., Any]) -> None:
    message = refused("acme/no-such-model", load)
    assert "neither a folder nor in the cache of downloaded models; download=True" in message
    assert "there is no folder ./missing" in refused("./missing", load)
    # The environment forbids what is asked for, and the error says why it failed.
    assert "cannot load acme/no-such-model: " in refused("acme/no-such-model", load, download=True)


def test_only_safetensors(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "has no weights in safetensors, only pytorch_model.bin" in refused(folder)
    assert isinstance(empty_model(folder), nn.Module)


def test_broken_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read: .*damaged"):
        load_model(folder)


def test_folders_that_are_not_of_a_model(folder: Path, tmp_path: Path) -> None:
    assert "is a file; give its folder" in refused(folder / "config.json")
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "empty has no config.json: it is not the folder of a model" in refused(empty)
    (folder / "config.json").write_text("{")
    assert "config.json is not JSON" in refused(folder)


def test_missing_weights_are_not_made_up(folder: Path) -> None:
    change_config(folder, architectures=["LlamaForSequenceClassification"])
    assert "has no weights for score.weight of LlamaForSequenceClassification" in refused(folder)


def test_quantized_models_are_refused(folder: Path) -> None:
    change_config(folder, quantization_config={"quant_method": "awq"})
    assert "is quantized already; calibrate the model it was made from" in refused(folder)
    change_config(folder, quantization_config={"quant_method": "compressed-tensors"})
    assert "QuantizationConfig: config_groups: Field required" in refused(folder)


MODELING = """
import pathlib
from transformers import LlamaConfig, LlamaForCausalLM
pathlib.Path({marker!r}).touch()
class OwnConfig(LlamaConfig):
    model_type = "own"
class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


def test_code_of_a_model_runs_only_when_trusted(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    marker = tmp_path / "was-run"
    (folder / "modeling_own.py").write_text(MODELING.format(marker=str(marker)))
    classes = {"AutoConfig": "modeling_own.OwnConfig"}
    classes["AutoModelForCausalLM"] = "modeling_own.OwnForCausalLM"
    change_config(folder, model_type="own", architectures=["OwnForCausalLM"], auto_map=classes)
    for load in (load_model, empty_model):
        assert "comes with code of its own; read it" in refused(folder, load)
        assert not marker.exists()
    assert type(load_model(folder, trust_remote_code=True)).__name__ == "OwnForCausalLM"
    assert type(empty_model(folder, trust_remote_code=True)).__name__ == "OwnForCausalLM"
    assert marker.exists()


TOKENS = [*map(chr, range(33, 33 + SIZES["vocab_size"] - 2)), "ab", "cd"]
SPECIAL = {"bos": 3, "eos": 4, "unk": 5, "pad": 6}


def write_gguf(path: Path, model: nn.Module) -> None:
    import gguf

    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, SIZES["num_hidden_layers"])
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(SIZES["num_hidden_layers"])
    writer.add_context_length(64)
    writer.add_embedding_length(SIZES["hidden_size"])
    writer.add_feed_forward_length(SIZES["intermediate_size"])
    writer.add_head_count(SIZES["num_attention_heads"])
    writer.add_head_count_kv(2)
    writer.add_vocab_size(SIZES["vocab_size"])
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([gguf.TokenType.NORMAL] * len(TOKENS))
    writer.add_token_merges(["a b", "c d"])
    for role, number in SPECIAL.items():
        getattr(writer, f"add_{role}_token_id")(number)
    for name, tensor in model.state_dict().items():
        writer.add_tensor(names.get_name(name, (".weight",)), tensor.numpy().astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_gguf(tmp_path: Path) -> None:
    model = llama()
    write_gguf(tmp_path / "tiny.gguf", model)
    loaded = load_model(tmp_path, gguf_file="tiny.gguf")
    assert type(loaded) is type(model)
    weight = "model.layers.1.mlp.down_proj.weight"
    assert torch.equal(loaded.state_dict()[weight], model.state_dict()[weight])
    assert type(empty_model(tmp_path, gguf_file="tiny.gguf")) is type(model)
    assert "there is no file other.gguf" in refused(tmp_path, gguf_file="other.gguf")


def test_a_tokenizer_of_gguf_has_the_special_tokens_of_the_file(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", llama())
    tokenizer = load_tokenizer(tmp_path, gguf_file="tiny.gguf")
    tokenizer.save_pretrained(tmp_path / "saved")
    for each in (tokenizer, load_tokenizer(tmp_path / "saved")):
        assert {role: getattr(each, f"{role}_token_id") for role in SPECIAL} == SPECIAL
        assert each.decode(each("a!").input_ids[-2:]) == "a!"
        assert each.clean_up_tokenization_spaces is False


def test_gguf_to_checkpoint(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", llama())
    model = load_model(tmp_path, gguf_file="tiny.gguf")
    recipe = inlay.Recipe.from_preset("W8A8", ignore=["lm_head"])
    inlay.calibrate(model, recipe, compiler="eager").save(tmp_path / "out", report=False)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    model.save_pretrained(tmp_path / "plain")
    assert "gguf" not in (tmp_path / "plain" / "config.json").read_text()
    assert type(load_model(tmp_path / "plain")) is type(model)


@pytest.mark.parametrize("load", [load_model, StoredModel.open])
def test_an_index_that_leads_outside_is_refused(tmp_path: Path, load: Any) -> None:
    """Nothing is read there, whatever it is; a link to a shard may lead anywhere."""
    llama().save_pretrained(tmp_path / "model", max_shard_size="20KB")
    folder, index = tmp_path / "model", tmp_path / "model" / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    name, shard = next(iter(content["weight_map"].items()))
    (folder / shard).rename(tmp_path / "blob")
    for place in ("../blob", str(tmp_path / "blob"), "sub/../../blob", "..\\blob", "C:\\blob"):
        changed = {**content, "weight_map": {**content["weight_map"], name: place}}
        index.write_text(json.dumps(changed))
        with pytest.raises(CheckpointError, match=r"index\.json says that .*outside") as raised:
            load(folder)
        assert place in str(raised.value)
        assert name in str(raised.value)
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=rf"{shard}, named in .*index\.json, is missing"):
        load(folder)
    (folder / shard).symlink_to(tmp_path / "blob")
    load(folder)


@pytest.mark.parametrize("load", [load_model, StoredModel.open])
def test_what_a_checkpoint_will_not_have_is_named(tmp_path: Path, load: Any) -> None:
    llama().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    extra = {f"model.layers.2.mtp.{name}": torch.ones(2) for name in "abcd"}
    computed = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    file = tmp_path / "model.safetensors"
    save_file({**tensors, **computed}, file, metadata={"format": "pt"})
    load(tmp_path)
    save_file({**tensors, **computed, **extra}, file, metadata={"format": "pt"})
    with pytest.warns(
        UserWarning, match=r"does not use 4 of \d+ tensors .*mtp\.a.* and 1 more.*copied"
    ):
        load(tmp_path)
