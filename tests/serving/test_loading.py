"""Checkpoints that run on kernels, compared with what transformers makes of them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from families import batch, bert, llama
from tokens import word_tokenizer
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM
from typer.testing import CliRunner

import inlay
from inlay import Calibration, ConfigurationError, Recipe
from inlay.cli import app
from inlay.nodes.kernel_support import missing_kernels
from inlay.serving.layers import IntegerLinear
from inlay.serving.loading import weight_bytes

CHANGES: dict[str, dict[str, Any]] = {
    "W8A16": {"weights": {"strategy": "channel", "group_size": None}},
    "W4A16": {"weights": {"group_size": 16}},
}


@pytest.fixture(autouse=True)
def with_vnni(monkeypatch) -> None:
    """Every processor computes integer products; only some compute them fast."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_vnni": True})
    missing_kernels.cache_clear()
    yield
    missing_kernels.cache_clear()


def saved(model: nn.Module, scheme: str, folder: Path) -> Path:
    ignore = ["lm_head"] if hasattr(model, "lm_head") else []
    recipe = Recipe.from_preset(scheme, ignore=ignore, **CHANGES.get(scheme, {}))
    calibration = Calibration(model, recipe, compiler="eager")
    if scheme == "W8A8_STATIC":
        calibration.observe(**batch(model))
    calibration.finalize()
    return calibration.save(folder, report=False)


def kernels_of(model: nn.Module) -> int:
    return sum(isinstance(module, IntegerLinear) for module in model.modules())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scheme", ["W8A8", "W8A8_STATIC"])
def test_int8_checkpoints_run_on_kernels(tmp_path: Path, scheme: str, dtype: torch.dtype) -> None:
    model = llama(num_hidden_layers=1)
    folder = saved(model, scheme, tmp_path / "out")
    loaded = inlay.load(folder, dtype=dtype, compile=False)
    assert kernels_of(loaded) == 7
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    one = batch(model)
    with torch.no_grad():
        found, exact = loaded(**one).logits, expected(**one).logits
    assert found.dtype == dtype
    # Rounding once moves a few values over to the next step of eight bits.
    assert float((found - exact).abs().max()) < 0.05 * float(exact.abs().max())
    assert weight_bytes(loaded) < weight_bytes(expected)


@pytest.mark.parametrize("scheme", ["W8A16", "W4A16"])
def test_other_checkpoints_run_as_in_transformers_and_say_why(tmp_path: Path, scheme: str) -> None:
    model = llama(num_hidden_layers=1)
    folder = saved(model, scheme, tmp_path / "out")
    with pytest.warns(UserWarning, match=r"q_proj, .*k_proj and 5 more: its input is not quant"):
        loaded = inlay.load(folder, compile=False)
    assert kernels_of(loaded) == 0
    one = batch(model)
    expected = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        assert torch.equal(loaded(**one).logits, expected(**one).logits)


def test_without_vnni_a_checkpoint_runs_without_kernels(tmp_path: Path, monkeypatch) -> None:
    model = llama(num_hidden_layers=1)
    folder = saved(model, "W8A8", tmp_path / "out")
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    missing_kernels.cache_clear()
    with pytest.warns(UserWarning, match="no AVX-512 VNNI"):
        loaded = inlay.load(folder, compile=False)
    assert kernels_of(loaded) == 0


@pytest.mark.slow
def test_a_compiled_model_generates_what_it_generates_eagerly(tmp_path: Path) -> None:
    model = llama(num_hidden_layers=2)
    folder = saved(model, "W8A8_STATIC", tmp_path / "out")
    prompt = torch.tensor([[5, 17, 3]])
    options: dict[str, Any] = {"min_new_tokens": 5, "max_new_tokens": 5, "do_sample": False}
    found = [
        inlay.load(folder, compile=compile).generate(prompt, **options) for compile in (False, True)
    ]
    assert found[0].shape == (1, 8)
    assert torch.equal(*found)


def test_encoders_have_no_cache(tmp_path: Path) -> None:
    model = bert()
    folder = saved(model, "W8A8_STATIC", tmp_path / "out")
    loaded = inlay.load(folder, compile=False)
    assert kernels_of(loaded) > 0
    one = batch(model)
    expected = AutoModel.from_pretrained(folder).eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(**one)[0], expected(**one)[0], rtol=0.05, atol=0.05)


def test_a_model_that_is_not_quantized_is_refused(tmp_path: Path) -> None:
    llama(num_hidden_layers=1).save_pretrained(tmp_path)
    with pytest.raises(ConfigurationError, match="is not quantized; load a checkpoint of"):
        inlay.load(tmp_path)


@pytest.mark.parametrize(("make", "is_json"), [(llama, False), (bert, True)])
def test_the_command_line_generates_or_embeds(tmp_path: Path, make: Any, is_json: bool) -> None:
    """Language models continue a text; encoders return a vector of length one."""
    folder = saved(make(), "W8A8", tmp_path / "out")
    word_tokenizer().save_pretrained(folder)
    found = CliRunner().invoke(app, ["run", str(folder), "--text", "a b", "--tokens", "2"])
    assert found.exit_code == 0, found.output
    (line,) = found.stdout.splitlines()
    if is_json:
        assert torch.tensor(json.loads(line)).norm().item() == pytest.approx(1, abs=1e-3)
    else:
        assert line
