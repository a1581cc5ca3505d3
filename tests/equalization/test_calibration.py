"""Equalization in a calibration: finalized graphs, statistics on disk, checkpoints."""

from pathlib import Path

import pytest
import torch
from blocks import SIZE, Blocks, Form
from families import batch, llama
from torch import nn
from torch.func import functional_call

from inlay import Calibration, Recipe
from inlay.errors import StatisticsError
from inlay.statistics.on_disk import StoredStatistics

pytestmark = pytest.mark.slow

X, Y = torch.randn(2, 2, 3, SIZE, generator=torch.Generator().manual_seed(3))


def recipe(strength: float | str | None, **options: object) -> Recipe:
    inputs = {"observer": "static_minmax"}
    options = {"ignore": (), **options}
    return Recipe.from_preset("W8A8_STATIC", inputs=inputs, equalize=strength, **options)


def calibrated(
    model: nn.Module, strength: float | str | None, *values: torch.Tensor
) -> Calibration:
    calibration = Calibration(model, recipe(strength), compiler="eager", progress=False)
    for value in values:
        calibration.observe(value)
    return calibration


def outliers() -> nn.Module:
    """A model in which a channel of some values is 100 times larger than its readers need it."""
    model = Blocks(Form(norm="rms")).eval()
    with torch.no_grad():
        for block in model.blocks:
            for made, readers in (
                (block.before.weight, (block.q, block.k, block.v)),
                (block.between.weight, (block.gate, block.up)),
                (block.up.weight, (block.down,)),
            ):
                made[1] *= 100
                for reader in readers:
                    reader.weight[:, 1] /= 100
            block.up.bias[1] *= 100
    return model


@torch.no_grad()
def test_finalized_graphs_quantize_the_equalized_model() -> None:
    model = outliers()
    errors = {}
    for strength in (None, 0.7, "auto"):
        torch._dynamo.reset()
        calibration = calibrated(model, strength, X)
        calibration.finalize()
        compiled = torch.compile(model, backend=calibration.backend)(X)
        exported = calibration.quantized_module(X)(X)
        assert torch.equal(compiled, exported)
        errors[strength] = float((compiled - model(X)).norm() / model(X).norm())
    assert errors[0.7] < errors[None] / 2
    assert errors["auto"] < errors[None] / 2


@torch.no_grad()
def test_stored_statistics_merge_and_carry_other_strengths(tmp_path: Path) -> None:
    model = outliers()
    one, other = calibrated(model, 0.9, X), calibrated(model, 0.9, Y)
    one.stored().save(tmp_path / "one")
    other.stored().save(tmp_path / "other")
    merged = StoredStatistics.load(tmp_path / "one").merge(
        StoredStatistics.load(tmp_path / "other")
    )
    again = Calibration.from_statistics(model, recipe(0.4), merged, progress=False)
    direct = calibrated(model, 0.4, X, Y)
    ours, theirs = again.finalize(), direct.finalize()
    assert ours.keys() == theirs.keys()
    for name, qparams in theirs.items():
        assert torch.equal(ours[name]["scale"], qparams["scale"])
        assert torch.equal(ours[name]["zero_point"], qparams["zero_point"])
    # What is stored is what was seen, so it can be scaled anew.
    seen = again.stored().slots["blocks.0.down.input"].tensors["max_vals"]
    assert torch.equal(seen, merged.slots["blocks.0.down.input"].tensors["max_vals"])


def test_statistics_without_channels_are_refused() -> None:
    model = outliers()
    stored = calibrated(model, None, X).stored()
    with pytest.raises(StatisticsError, match="no ranges of channels"):
        Calibration.from_statistics(model, recipe(0.5), stored)


@torch.no_grad()
def test_dynamic_scales_and_importance_see_the_equalized_model() -> None:
    """Importance of channels, as all that was observed, is that of the scaled value."""
    model = outliers()
    weights = {"observer": "imatrix_mse"}
    wanted = Recipe.from_preset("W8A8", weights=weights, equalize=0.5)
    calibration = Calibration(model, wanted, compiler="eager", progress=False)
    calibration.observe(X)
    before = calibration.stored().slots["blocks.0.q.input:importance"].tensors["_imatrix_sum"]
    calibration.finalize()
    slot = calibration.plan.slots["blocks.0.q.weight"].importance
    after = calibration.statistics.of(slot).tensors["_imatrix_sum"]
    equalized = calibration.equalization.parameters.named("blocks.0.q.weight")
    scales = (equalized / model.blocks[0].q.weight)[0]
    torch.testing.assert_close(after, before / scales**2)
    result = torch.compile(model, backend=calibration.backend)(X)
    assert float((result - model(X)).norm() / model(X).norm()) < 0.05


@pytest.mark.parametrize("scheme", ["W8A8", "W8A8_STATIC", "W4A16"])
def test_padding_is_left_out_of_channels(scheme: str) -> None:
    """Also where inputs have scales per token, so that nothing else of them is observed."""
    model = llama(hidden_size=128, intermediate_size=128)
    padded = batch(model, rows=1)
    padded["attention_mask"][:, 4:] = 0
    data = {name: value[:, :4] for name, value in padded.items()}
    found = []
    for inputs in (padded, data):
        wanted = Recipe.from_preset(scheme, ignore=["lm_head"], equalize=0.5)
        calibration = Calibration(model, wanted, compiler="eager", progress=False)
        calibration.observe(**inputs)
        calibration.graphs.require_padding_left_out()
        found.append(calibration.stored().slots["model.layers.0.mlp.down_proj.input:channels"])
    assert found[0].tokens == found[1].tokens == 4
    for name, expected in found[1].tensors.items():
        torch.testing.assert_close(found[0].tensors[name], expected)


def test_explain_says_what_is_equalized_and_what_is_not() -> None:
    calibration = calibrated(Blocks(Form(mlp="gelu")).eval(), 0.5, X)
    text = calibration.explain()
    assert "blocks.0.o: channels can be equalized, in blocks.0.v.weight, blocks.0.v.bias" in text
    assert "blocks.1.down: not equalized: gelu does not commute with a scale per channel" in text
    calibration.finalize()
    assert (
        "blocks.0.o: equalized with strength 0.5; the largest channel was" in calibration.explain()
    )


@torch.no_grad()
def test_a_checkpoint_loads_with_the_outputs_of_the_finalized_graph(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from inlay.report import ReportData

    model = llama()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "up_proj" in name:
                parameter[3] *= 50
    wanted = recipe("auto", ignore=["lm_head"])
    calibration = Calibration(model, wanted, compiler="eager", progress=False)
    inputs = batch(model)
    calibration.observe(**inputs)
    calibration.finalize()
    calibration.save(tmp_path / "out")
    compiled = torch.compile(model, backend=calibration.backend)(**inputs, use_cache=False).logits
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert torch.equal(loaded(**inputs, use_cache=False).logits, compiled)
    assert Recipe.from_yaml(tmp_path / "out" / "recipe.yaml").equalize == "auto"
    report = ReportData.from_json((tmp_path / "out" / "report.json").read_text())
    assert len(report.equalized) == 8
    assert report.unequalized == ()
    assert max(value.before for value in report.equalized) > 20
    page = (tmp_path / "out" / "report.html").read_text()
    assert "<dt>Equalized</dt><dd>8 values; the largest channel of what" in page


@torch.no_grad()
def test_a_checkpoint_in_bfloat16_has_the_parameters_of_the_finalized_graph(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = llama().bfloat16()
    calibration = Calibration(
        model, recipe(0.7, ignore=["lm_head"]), compiler="eager", progress=False
    )
    inputs = batch(model)
    calibration.observe(**inputs)
    calibration.finalize()
    calibration.save(tmp_path / "out", report=False)
    compiled = torch.compile(model, backend=calibration.backend)(**inputs, use_cache=False).logits
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert loaded.dtype == torch.bfloat16
    assert torch.equal(loaded(**inputs, use_cache=False).logits, compiled)
    equalized = calibration.equalization.parameters
    norms = [name for name in equalized.changed if "norm" in name]
    assert len(norms) == 4
    for name in norms:
        assert torch.equal(loaded.get_parameter(name), equalized.named(name))
    # The function is kept up to the rounding of bfloat16.
    copied = {name: equalized.of(value) for name, value in model.named_parameters()}
    plain, scaled = model(**inputs)[0], functional_call(model, copied, (), inputs)[0]
    assert float((plain - scaled).norm() / plain.norm()) < 4 * torch.finfo(torch.bfloat16).eps
