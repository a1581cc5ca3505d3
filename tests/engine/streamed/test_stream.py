"""A model that is streamed from disk to disk, held against one that is calibrated in memory."""

import json
from pathlib import Path

import pytest
import torch
from families import bert, llama, qwen3_moe
from folders import UNCHECKED, assert_same_folder, report_in, tensors_in
from safetensors.torch import load_file, save_file
from streaming_runs import batches, in_memory, stopping, streamed
from transformers import AutoModelForCausalLM

from inlay import Recipe, stream
from inlay.checkpoint.loading import load_model
from inlay.checkpoint.stored_model import StoredModel
from inlay.engine.driver import Region
from inlay.engine.streamed.comparison import _Pair
from inlay.engine.streamed.stages import Starting
from inlay.engine.streamed.streaming import Streaming
from inlay.errors import CheckpointError, ConfigurationError, StatisticsError

pytestmark = pytest.mark.slow

STATIC = Recipe.from_preset("W8A8_STATIC", ignore=["lm_head"])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    llama(num_hidden_layers=3).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_it_writes_what_a_run_in_memory_writes(folder: Path) -> None:
    """With padding, batches of several lengths, and held-out data; values in memory or on disk.

    Arguments that are not tensors go with their batch, and these change nothing.
    """
    data, options = batches(12, lengths=(6, 9)), {"samples": 12, "held_out": 12}
    plain = {"use_cache": False, "output_attentions": None, "logits_to_keep": 0}
    expected = in_memory(folder, STATIC, [{**plain, **batch} for batch in data], **options)
    for name, offload in (("streamed", False), ("offloaded", True)):
        options["offload_activations"] = offload
        found = streamed(folder, STATIC, data, name=name, **options)
        data = [{**plain, **batch} for batch in data]
        assert_same_folder(found, expected)
    texts = [str(report_in(place)["findings"]) for place in (found, expected)]
    assert [UNCHECKED in text for text in texts] == [True, False]
    assert sorted(path.name for path in folder.parent.iterdir()) == [
        "in-memory",
        "model",
        "offloaded",
        "streamed",
    ]
    model = AutoModelForCausalLM.from_pretrained(found).eval()
    with torch.no_grad():
        assert bool(model(torch.tensor([[1, 2, 3]])).logits.isfinite().all())


RECIPES = {
    "fused": Recipe.from_preset("NVFP4", ignore=["lm_head"]),
    "kv_cache": Recipe.from_preset(
        "FP8", ignore=["lm_head"], kv_cache={"num_bits": 8, "type": "float"}
    ),
    "importance": Recipe.from_preset(
        "W4A16", ignore=["lm_head"], weights={"observer": "imatrix_mse", "group_size": 16}
    ),
    "gptq": Recipe.from_preset("W4A16", ignore=["lm_head"], weights={"group_size": 16}, gptq=True),
    "histogram": Recipe.from_preset(
        "W8A8_STATIC", ignore=["lm_head"], inputs={"observer": "histogram"}
    ),
    "moving": Recipe.from_preset("W8A8_STATIC", ignore=["lm_head"], inputs={"observer": "minmax"}),
}


@pytest.mark.parametrize("name", RECIPES)
def test_whatever_is_observed(folder: Path, name: str) -> None:
    expected = in_memory(folder, RECIPES[name], batches(4), held_out=0)
    assert_same_folder(streamed(folder, RECIPES[name], batches(4), held_out=0), expected)


def test_compiled(folder: Path) -> None:
    """A block is compiled before any weight is read, for weights of the layout that they have."""
    options = {"compiler": "inductor", "held_out": 0}
    data = batches(2, lengths=(6,))
    expected = in_memory(folder, STATIC, data, **options)
    assert_same_folder(streamed(folder, STATIC, data, **options), expected)


def test_outputs_are_compared_batch_by_batch(folder: Path, monkeypatch) -> None:
    """The logits of all held-out batches may be larger than the model."""
    waiting: set[int] = set()
    run, outputs = _Pair.run, _Pair.outputs

    def noting_run(pair: _Pair, region: Region) -> None:
        assert not waiting
        run(pair, region)
        if pair.is_done:
            waiting.add(id(pair))

    def noting_outputs(pair: _Pair, starting: Starting) -> object:
        waiting.remove(id(pair))
        return outputs(pair, starting)

    monkeypatch.setattr(_Pair, "run", noting_run)
    monkeypatch.setattr(_Pair, "outputs", noting_outputs)
    streamed(folder, STATIC, batches(6), samples=3, held_out=3)


def test_a_tied_head_that_is_quantized_too(tmp_path: Path) -> None:
    """It is written last, when its input has been observed, and untied."""
    llama(tie_word_embeddings=True).save_pretrained(tmp_path / "model")
    recipe, data = Recipe.from_preset("W8A8_STATIC", ignore=()), batches(4)
    expected = in_memory(tmp_path / "model", recipe, data, samples=4, held_out=4)
    found = streamed(tmp_path / "model", recipe, data, samples=4, held_out=4)
    assert_same_folder(found, expected)
    assert "lm_head.weight_scale" in tensors_in(found)


def test_without_data_every_weight_is_read_once_and_nothing_is_traced(folder: Path) -> None:
    recipe = Recipe.from_preset("FP8_DYNAMIC", ignore=["lm_head"])
    expected = in_memory(folder, recipe, None)
    stored = StoredModel.open(folder)
    out = stream(stored, recipe, out=folder.parent / "streamed").folder
    assert_same_folder(out, expected)
    assert set(stored.reads.values()) == {1}
    assert stored.reads.keys() == stored.files.tensors.keys()


GATES = ["lm_head", "re:.*gate$"]
OF_EXPERTS = {
    "weights": Recipe.from_preset("W4A16", ignore=GATES, weights={"group_size": 16}),
    "gptq": Recipe.from_preset(
        "W4A16", ignore=GATES, weights={"group_size": 16}, gptq=True, experts="fill"
    ),
    "inputs": Recipe.from_preset(
        "FP8", ignore=GATES, inputs={"observer": "static_minmax"}, experts="fill"
    ),
    "fused": Recipe.from_preset("NVFP4", ignore=GATES, experts="layer"),
}


@pytest.mark.parametrize("name", OF_EXPERTS)
def test_experts_are_quantized_one_by_one(tmp_path: Path, name: str) -> None:
    qwen3_moe(num_experts=8).save_pretrained(tmp_path / "model")
    data = batches(2)
    expected = in_memory(tmp_path / "model", OF_EXPERTS[name], data, samples=2, held_out=2)
    found = streamed(tmp_path / "model", OF_EXPERTS[name], data, samples=2, held_out=2)
    assert_same_folder(found, expected)


def test_experts_are_let_go_of_when_their_block_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    qwen3_moe(num_hidden_layers=3).save_pretrained(tmp_path / "model")
    quantize, held = Streaming.finalize, []

    def noting(self: Streaming, region: Region) -> object:
        experts = filter(self.run.plan.is_routed, self.run.plan.weights)
        weights = {name: self.run.graphs.weights.of_module(name) for name in experts}
        held.append({n.split(".")[2] for n, weight in weights.items() if weight.stride() != (0, 0)})
        return quantize(self, region)

    monkeypatch.setattr(Streaming, "finalize", noting)
    streamed(tmp_path / "model", Recipe.from_preset("FP8_DYNAMIC", ignore=GATES), None)
    assert held == [{"0"}, {"1"}, {"2"}, set()]


def test_experts_that_saw_too_little_are_refused_by_name(tmp_path: Path) -> None:
    qwen3_moe(num_experts=8).save_pretrained(tmp_path / "model")
    recipe = Recipe.from_preset("FP8", ignore=GATES, inputs={"observer": "static_minmax"})
    with pytest.raises(StatisticsError, match=r"too few tokens.*layers\.0\.mlp\.experts"):
        streamed(tmp_path / "model", recipe, batches(1), held_out=0)
    assert not (tmp_path / "streamed").exists()


def test_with_data_every_weight_is_read_once(folder: Path) -> None:
    stored = StoredModel.open(folder)
    data = batches(2)
    stream(stored, STATIC, data, out=folder.parent / "out", compiler="eager", held_out=0)
    assert set(stored.reads.values()) == {1}


def test_a_model_without_a_head(tmp_path: Path) -> None:
    bert().save_pretrained(tmp_path / "model")
    recipe = Recipe.from_preset("W8A8_STATIC", ignore=())
    expected = in_memory(tmp_path / "model", recipe, batches(3), held_out=0)
    assert_same_folder(streamed(tmp_path / "model", recipe, batches(3), held_out=0), expected)


def test_what_cannot_be_cut_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    llama(num_hidden_layers=1).save_pretrained(tmp_path / "one")
    stored = StoredModel.open(tmp_path / "one")
    with pytest.raises(ConfigurationError, match=r"it has no blocks.*calibrate it in memory"):
        stream(stored, STATIC, batches(2), out=tmp_path / "out", compiler="eager")
    llama().save_pretrained(tmp_path / "breaking")
    stored = StoredModel.open(tmp_path / "breaking")
    forward = type(stored.model.model.layers[0]).forward

    def breaking(self, hidden_states, *args, **kwargs):
        torch._dynamo.graph_break()
        return forward(self, hidden_states, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(stored.model.model.layers[0]), "forward", breaking)
        with pytest.raises(ConfigurationError, match="cannot be cut at its blocks"):
            stream(stored, STATIC, batches(2), out=tmp_path / "out", compiler="eager")
    assert not stored.reads
    with pytest.raises(ConfigurationError, match="no data to observe"):
        stream(stored, STATIC, out=tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["breaking", "one"]


def test_a_missing_or_damaged_or_wrong_file_is_named(folder: Path) -> None:
    load_model(folder).save_pretrained(folder.parent / "sharded", max_shard_size="20KB")
    sharded = folder.parent / "sharded"
    files = sorted(sharded.glob("model-*.safetensors"))
    assert len(files) > 3
    content = files[1].read_bytes()

    def refusal(match: str) -> None:
        with pytest.raises(CheckpointError, match=match) as raised:
            stream(sharded, STATIC, batches(2), out=folder.parent / "out")
        assert files[1].name in str(raised.value)

    files[1].write_bytes(content[:-10])
    refusal("truncated or damaged")
    files[1].write_bytes(files[2].read_bytes())
    refusal("has no tensor")
    tensors = load_file(files[2])
    files[1].write_bytes(content)
    save_file({name: tensor[:3].clone() for name, tensor in tensors.items()}, files[2])
    with pytest.raises(CheckpointError, match=f"{files[2].name} has the shape"):
        stream(sharded, STATIC, batches(2), out=folder.parent / "out")
    files[1].unlink()
    refusal("is missing")
    assert not (folder.parent / "out").exists()
    assert not (folder.parent / "out.streaming").exists()


def test_only_the_same_run_is_resumed(folder: Path) -> None:
    """And a block that was written is verified first."""
    options = {"held_out": 0, "compiler": "eager", "out": folder.parent / "out"}
    with stopping(after=2):
        stream(folder, STATIC, batches(3), **options)
    with pytest.raises(ConfigurationError, match="holds the work of an interrupted run"):
        stream(folder, STATIC, batches(3), **options)
    with pytest.raises(ConfigurationError, match="made with another data"):
        stream(folder, STATIC, batches(2), resume=True, **options)
    with pytest.raises(ConfigurationError, match="made with another recipe"):
        stream(folder, RECIPES["moving"], batches(3), resume=True, **options)
    files = sorted((folder.parent / "out.streaming" / "checkpoint").glob("region-*"))
    content = files[0].read_bytes()
    files[0].write_bytes(content[:-1] + b"x")
    with pytest.raises(CheckpointError, match=f"{files[0].name}.*for before the blocks.*changed"):
        stream(folder, STATIC, batches(3), resume=True, **options)
    files[0].write_bytes(content)
    values = next((folder.parent / "out.streaming" / "activations").glob("before-*/000001*"))
    kept = values.read_bytes()
    values.write_bytes(kept[:-1] + b"x")
    with pytest.raises(CheckpointError, match=r"000001\.safetensors.*was changed"):
        stream(folder, STATIC, batches(3), resume=True, **options)
    values.write_bytes(kept)
    lasting = next((folder.parent / "out.streaming" / "activations" / "lasting").iterdir())
    kept = lasting.read_bytes()
    lasting.write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=rf"{lasting.name}, a value .* was changed"):
        stream(folder, STATIC, batches(3), resume=True, **options)
    lasting.write_bytes(kept)
    weights = (folder / "model.safetensors").read_bytes()
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.2.mlp.up_proj.weight"] *= 0.1  # no header shows it
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigurationError, match=r"weights \(model\.layers\.2\.mlp\.up_proj\.w"):
        stream(folder, STATIC, batches(3), resume=True, **options)
    (folder / "model.safetensors").write_bytes(weights)
    stream(folder, STATIC, batches(3), resume=True, **options)
    assert_same_folder(options["out"], in_memory(folder, STATIC, batches(3), held_out=0))


FOREIGN = ("precious.txt", "checkpoint/notes.md", "regions/00001/mine.txt", "activations/a/b")


def test_files_that_it_did_not_write_stay(folder: Path) -> None:
    """Put there before the run, while it was interrupted, or in folders that it makes."""
    work, out = folder.parent / "out.streaming", folder.parent / "out"
    options = {"held_out": 0, "compiler": "eager", "out": out}
    work.mkdir()
    (work / FOREIGN[0]).write_text(FOREIGN[0])
    with stopping(after=3):
        stream(folder, STATIC, batches(2), **options)
    values = next((work / "activations").glob("before-*"))
    (values / "mine.txt").touch()
    for name in FOREIGN[1:]:
        (work / name).parent.mkdir(exist_ok=True)
        (work / name).write_text(name)
    with pytest.warns(UserWarning, match="which Inlay did not write"):
        stream(folder, STATIC, batches(2), resume=True, **options)
    assert (out / "notes.md").read_text() == FOREIGN[1]  # it moved with the checkpoint
    left = {path.relative_to(work).as_posix() for path in work.rglob("*") if path.is_file()}
    kept = {*FOREIGN, f"activations/{values.name}/mine.txt"} - {FOREIGN[1]}
    assert left == kept
    with pytest.warns(UserWarning, match=r"holds .*precious\.txt"):
        stream(folder, STATIC, batches(2), overwrite=True, **options)
    assert_same_folder(out, in_memory(folder, STATIC, batches(2), held_out=0))


def test_a_layer_that_no_batch_reaches_is_refused_by_name(folder: Path) -> None:
    stored = StoredModel.open(folder)
    stored.model.model.layers[1].self_attn.o_proj.forward = lambda value: value
    out = folder.parent / "out"
    with pytest.raises(StatisticsError, match=r"layers\.1\.self_attn\.o_proj\.input"):
        stream(stored, STATIC, batches(2), out=out, compiler="eager", held_out=0)
    assert not out.exists()


def test_the_index_names_every_file(folder: Path) -> None:
    out = streamed(folder, Recipe.from_preset("W8A8", ignore=["lm_head"]), None)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = {path.name for path in out.glob("*.safetensors")}
    assert set(index["weight_map"].values()) == files
    tensors = tensors_in(out)
    assert index["weight_map"].keys() == tensors.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
