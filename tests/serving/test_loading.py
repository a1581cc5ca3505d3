"""Checkpoints that run on kernels, compared with what transformers makes of them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from families import batch, bert, llama
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples
from tokens import word_tokenizer
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM
from typer.testing import CliRunner

import inlay
from inlay import Calibration, ConfigurationError, Recipe
from inlay.cli import app
from inlay.nodes.kernel_support import missing_kernels, missing_packed_kernels
from inlay.nodes.packed_linear import int4_linear, int8_linear, packed_int4, unpacked_int4
from inlay.serving.layers import IntegerLinear, PackedLinear
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
    kernels = (IntegerLinear, PackedLinear)
    return sum(isinstance(module, kernels) for module in model.modules())


def packed(model: nn.Module) -> list[PackedLinear]:
    return [module for module in model.modules() if isinstance(module, PackedLinear)]


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


def wide(scheme: str, folder: Path) -> tuple[nn.Module, Path]:
    """Save a model of 64 outputs and more, whose weights alone are quantized."""
    model = llama(
        num_hidden_layers=1, hidden_size=64, intermediate_size=128,
        num_attention_heads=2, num_key_value_heads=2,
    )  # fmt: skip
    changes = {"group_size": 32} if scheme == "W4A16" else CHANGES[scheme]["weights"]
    recipe = Recipe.from_preset(scheme, ignore=["lm_head"], weights=changes)
    calibration = Calibration(model, recipe, compiler="eager")
    calibration.finalize()
    return model, calibration.save(folder, report=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scheme", ["W8A16", "W4A16"])
def test_weights_alone_stay_packed(tmp_path: Path, scheme: str, dtype: torch.dtype) -> None:
    model, folder = wide(scheme, tmp_path / "out")
    if missing_packed_kernels("cpu") is not None:
        pytest.skip("the processor has no kernels for packed weights")
    loaded = inlay.load(folder, dtype=dtype, compile=False)
    assert kernels_of(loaded) == 7
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    allowed = {"rtol": 0.02, "atol": 0.02} if dtype == torch.bfloat16 else {}
    for rows, tokens in ((1, 1), (2, 7), (2, 40)):  # by a kernel, and dequantized
        one = batch(model, 0, rows, tokens)
        with torch.no_grad():
            torch.testing.assert_close(loaded(**one).logits, expected(**one).logits, **allowed)
    held = sum(module.weight.numel() for module in packed(loaded))
    parameters = sum(module.in_features * module.out_features for module in packed(loaded))
    assert held == parameters // (2 if scheme == "W4A16" else 1)


@pytest.mark.parametrize("scheme", ["W8A16", "W4A16"])
def test_without_kernels_packed_weights_run_as_in_transformers(
    tmp_path: Path, scheme: str, monkeypatch: Any
) -> None:
    model, folder = wide(scheme, tmp_path / "out")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    missing_packed_kernels.cache_clear()
    with pytest.warns(UserWarning, match=r"q_proj, .*k_proj and 5 more: the processor has no AVX"):
        loaded = inlay.load(folder, compile=False)
    missing_packed_kernels.cache_clear()
    assert kernels_of(loaded) == 0
    one, expected = batch(model), AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        assert torch.equal(loaded(**one).logits, expected(**one).logits)


@pytest.mark.hypothesis
@examples(10)
@given(
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.sampled_from([32, 64, 128]),
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from([(1,), (2, 3), (33,), (0,)]),
    st.booleans(),
)
def test_packed_products_are_those_of_the_values(
    dtype: torch.dtype, group: int, blocks: int, groups: int, lead: Any, has_bias: bool
) -> None:
    """Compared in float64: weights and scales are exact, so only the results are rounded."""
    if missing_packed_kernels("cpu") is not None:
        return
    outputs, inputs = 64 * blocks, group * groups
    value = torch.randn(*lead, inputs).to(dtype)
    bias = torch.randn(outputs).to(dtype) if has_bias else None
    four, eight = (torch.randint(-(2**b), 2**b, (outputs, inputs)).to(torch.int8) for b in (3, 7))
    scales = (torch.rand(groups, outputs) / 8 + 0.01).to(dtype)
    assert torch.equal(unpacked_int4(packed_int4(four), outputs), four)
    wide = {"four": scales.double().t().repeat_interleave(group, 1) * four.double()}
    wide["eight"] = scales[0].double().unsqueeze(1) * eight.double()
    found = {"four": int4_linear(value, packed_int4(four), scales, bias)}
    found["eight"] = int8_linear(value, eight, scales[0], bias)
    for name, weight in wide.items():
        own = None if bias is None else bias.double()
        exact = F.linear(value.double(), weight, own)
        added = F.linear(value.double().abs(), weight.abs()) + (0 if own is None else own.abs())
        assert found[name].dtype == dtype
        error = (found[name].double() - exact).abs()
        assert (error <= 3 * torch.finfo(dtype).eps * added + 1e-6).all()


def test_groups_that_no_kernel_takes_are_decompressed(tmp_path: Path) -> None:
    folder = saved(llama(num_hidden_layers=1), "W4A16", tmp_path / "out")
    with pytest.warns(UserWarning, match="4-bit weight has scales per 16, not per 32, 64, 128"):
        assert kernels_of(inlay.load(folder, compile=False)) == 0


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
