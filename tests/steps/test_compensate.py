"""GPTQ inside a calibration: what is gathered, and that everything uses the compensated weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from families import batch, bert, llama, qwen3_moe
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples
from torch import nn
from transformers import AutoModelForCausalLM

import inlay
from inlay import Calibration, Recipe
from inlay.compensation.gptq import output_errors
from inlay.compensation.settings import GPTQ
from inlay.engine import hessian_room
from inlay.engine.calibrate import requantize
from inlay.errors import ConfigurationError, StatisticsError
from inlay.observers.hessian import whole
from inlay.recipe import Plan
from inlay.statistics.on_disk import StoredStatistics
from inlay.statistics.value import measure


def recipe(**changes: Any) -> Recipe:
    fields = {"ignore": ["lm_head"], "weights": {"group_size": 16}, "gptq": True, **changes}
    return Recipe.from_preset("W4A16", **fields)


def gathered(model: nn.Module, batches: list[dict[str, Any]], **changes: Any) -> Calibration:
    calibration = Calibration(model, recipe(**changes), compiler="eager", progress=False)
    for each in batches:
        calibration.observe(**each)
    return calibration


def hessians_by_hooks(model: nn.Module, batches: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """xᵀx of each Linear's valid tokens, from hooks on the model as it is."""
    found: dict[str, torch.Tensor] = {}
    mask: list[torch.Tensor] = []

    def hook(name: str) -> Any:
        def add(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            rows = args[0][mask[0]].double()
            found[name] = found.get(name, 0) + rows.T @ rows

        return add

    linears = {n: m for n, m in model.encoder.named_modules() if isinstance(m, nn.Linear)}
    handles = [m.register_forward_pre_hook(hook(f"encoder.{n}")) for n, m in linears.items()]
    for each in batches:
        mask[:] = [each["attention_mask"].bool()]
        with torch.no_grad():
            model(**each)
    for handle in handles:
        handle.remove()
    return found


@given(seed=st.integers(0, 99), padding=st.lists(st.integers(0, 5), min_size=1, max_size=3))
@examples(4)
def test_hessians_are_those_of_valid_tokens(seed: int, padding: list[int]) -> None:
    torch._dynamo.reset()
    model = bert()
    batches = [batch(model, seed + number) for number in range(len(padding))]
    for each, left_out in zip(batches, padding, strict=True):
        each["attention_mask"][0, 6 - left_out :] = 0
    seen = gathered(model, batches, ignore=["pooler.dense"]).statistics.snapshot()
    expected = hessians_by_hooks(model, batches)
    compared = 0
    for name, known in seen.items():
        own = expected[name.removesuffix(".input:hessian")]
        torch.testing.assert_close(
            whole(known.tensors["hessian"]).double(),
            own,
            rtol=1e-5,
            atol=1e-5 * float(own.abs().max()),
        )
        assert int(known.tokens) == sum(int(each["attention_mask"].sum()) for each in batches)
        compared += 1
    assert compared == 12


@given(columns=st.sampled_from([1, 383, 384, 385, 1000]), tokens=st.integers(1, 9))
@examples(6)
def test_the_lower_triangle_has_all_of_a_hessian(columns: int, tokens: int) -> None:
    fc = nn.Linear(columns, 1, bias=False)
    plan = Plan(nn.Sequential(fc), recipe(ignore=[], weights={"strategy": "channel"}))
    (slot,) = (slot.hessian for slot in plan.weight_slots())
    x = torch.randn(tokens, columns)
    found = whole(measure(slot, x).tensors["hessian"])
    assert torch.equal(found, found.T)
    torch.testing.assert_close(found, x.T @ x, rtol=1e-4, atol=1e-4)


@given(tokens=st.integers(1, 40), seed=st.integers(0, 99))
@examples(8)
def test_the_last_eighth_of_valid_tokens_is_held_out(tokens: int, seed: int) -> None:
    plan = Plan(nn.Sequential(nn.Linear(16, 2)), recipe(ignore=[], gptq={"damping": "auto"}))
    (slot,) = (slot.held_out_hessian for slot in plan.weight_slots())
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, 16, generator=generator)
    held_out = x[len(x) - len(x) // 8 :]
    expected = held_out.T @ held_out
    found = measure(slot, x).tensors["hessian"]
    torch.testing.assert_close(whole(found), expected)
    padded = torch.full((tokens + 9, 16), torch.nan)
    valid = torch.zeros(tokens + 9, dtype=torch.bool)
    valid[torch.randperm(tokens + 9, generator=generator)[:tokens]] = True
    padded[valid] = x
    found = measure(slot, padded, valid).tensors["hessian"]
    torch.testing.assert_close(whole(found), expected)


def test_auto_damping_is_that_of_each_layer() -> None:
    model = llama()
    data = [batch(model, number) for number in range(4)]
    calibration = gathered(model, data, gptq={"damping": "auto"})
    calibration.finalize()
    gains = calibration.graphs.weights.compensations.values()
    assert {round(each.damping, 6) for each in gains} <= {0.01, 0.02, 0.05, 0.1, 0.2}
    stored = gathered(model, data, gptq={"keep_hessians": True})
    stored.finalize()
    with pytest.raises(StatisticsError, match="no held-out tokens to choose the damping by"):
        requantize(model, recipe(gptq={"damping": "auto"}), stored.stored())


def test_readers_of_a_value_share_its_hessian() -> None:
    calibration = gathered(llama(), [batch(llama(), 0)])
    block = "model.layers.0"
    of = {
        name: calibration.statistics.of(calibration.plan.slots[f"{block}.{name}.weight"].hessian)
        for name in ("self_attn.q_proj", "self_attn.k_proj", "mlp.gate_proj", "mlp.up_proj")
    }
    assert of["self_attn.q_proj"] is of["self_attn.k_proj"]
    assert of["mlp.gate_proj"] is of["mlp.up_proj"] is not of["self_attn.q_proj"]


@pytest.mark.parametrize("changes", [{}, {"equalize": 0.5}, {"weights": {"strategy": "channel"}}])
def test_no_layer_loses_by_compensation_and_all_gain_together(changes: dict[str, Any]) -> None:
    model = llama()
    calibration = gathered(model, [batch(model, number) for number in range(8)], **changes)
    statistics = {
        slot.module: calibration.statistics.of(slot.hessian)
        for slot in calibration.plan.weight_slots()
    }
    kept = {name: known.tensors["hessian"].clone() for name, known in statistics.items()}
    qparams = calibration.finalize()
    assert len(calibration.graphs.weights.compensations) == 14
    for slot in calibration.plan.weight_slots():
        gain = calibration.graphs.weights.compensations[slot.module]
        assert gain.after <= gain.before
        view = calibration.plan.weights[slot.module]
        weight = calibration.graphs.weights.current(view)
        folded = calibration.graphs.weights.folded(slot.module, qparams)
        assert torch.equal(folded, weight), "compensated weights lie on their grid"
        if "equalize" not in changes:
            difference = (folded - calibration.graphs.weights.plain(view).detach()).unsqueeze(0)
            error = output_errors(difference, kept[slot.module].unsqueeze(0)).sum()
            assert float(error) == pytest.approx(gain.after, rel=1e-3)
    gains = calibration.graphs.weights.compensations.values()
    assert sum(each.after for each in gains) < 0.9 * sum(each.before for each in gains)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_graph_checkpoint_and_export_have_the_compensated_weights(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    model = llama().to(dtype)
    data = [batch(model, number) for number in range(6)]
    run = inlay.calibrate(model, recipe(), data, held_out=2, samples=8, compiler="eager")
    run.save(tmp_path / "out")
    inputs = data[0]
    with torch.no_grad():
        in_graph = torch.compile(model, backend=run.backend)(**inputs).logits
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=dtype)
        served = loaded(**inputs).logits
    close = {"rtol": 0, "atol": 1e-5 if dtype == torch.float32 else 0.02}
    torch.testing.assert_close(in_graph, served, **close)
    for slot in run.plan.weight_slots():
        view = run.plan.weights[slot.module]
        own = run.graphs.weights.current(view)
        assert torch.equal(loaded.get_submodule(slot.module).weight.to(own), own)
        assert not torch.equal(own, run.graphs.weights.plain(view))
    from inlay.cli.outcome import report_data

    shown = report_data(tmp_path / "out")
    assert shown is not None
    assert [each.module for each in shown.compensated] == list(run.graphs.weights.compensations)
    assert not any("hessian" in name for name in StoredStatistics.load(tmp_path / "out").slots)


def test_shared_weights_are_compensated_once() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(32, 16), nn.Linear(32, 16)
            self.b.weight = self.a.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.a(x) + self.b(x.roll(1, -1) ** 2)

    model = Twice()
    calibration = Calibration(model, recipe(ignore=[]), compiler="eager", progress=False)
    calibration.observe(torch.randn(64, 32))
    calibration.finalize(accept={"unobserved"})
    compensated = calibration.graphs.weights.compensated
    assert torch.equal(compensated["a"], compensated["b"])


def test_without_data_the_weights_are_named() -> None:
    calibration = Calibration(llama(), recipe(), compiler="eager", progress=False)
    with pytest.raises(StatisticsError, match=r"no data for model\.layers\.0\.self_attn\.q_proj"):
        calibration.finalize()
    calibration.finalize(accept={"unobserved"})
    assert not calibration.graphs.weights.compensations


@pytest.mark.slow
def test_stored_hessians_serve_another_format(tmp_path: Path) -> None:
    model = llama()
    data = [batch(model, number) for number in range(4)]
    kept = inlay.calibrate(
        model, recipe(gptq={"keep_hessians": True}), data, held_out=0, compiler="eager"
    )
    stored = kept.stored()
    other = recipe(weights={"num_bits": 3, "group_size": 32})
    again = requantize(model, other, stored)
    expected = inlay.calibrate(model, other, data, held_out=0, compiler="eager")
    for slot in expected.plan.weight_slots():
        assert torch.equal(
            again.graphs.weights.current(slot), expected.graphs.weights.current(slot)
        )
    with pytest.raises(StatisticsError, match="keep_hessians"):
        requantize(model, other, expected.stored())


def test_hessians_that_do_not_fit_are_refused_before_data_runs(monkeypatch) -> None:
    monkeypatch.setattr(hessian_room, "_free", lambda: 30_000)
    model = llama()
    with pytest.raises(ConfigurationError, match=r"at least 49\.2 kB .* 30 kB .* --stream"):
        inlay.calibrate(model, recipe(), [batch(model, 0)], held_out=0, compiler="eager")


def test_a_hessian_that_overflows_is_reported() -> None:
    model = nn.Sequential(nn.Linear(32, 16))
    calibration = Calibration(model, recipe(ignore=[]), compiler="eager", progress=False)
    calibration.observe(torch.full((4, 32), 1e30))
    with pytest.warns(UserWarning, match="could not factorize the Hessian of 0"):
        calibration.finalize()
    assert calibration.graphs.weights.compensations["0"].failed


@pytest.mark.slow
def test_experts_have_hessians_of_the_tokens_sent_to_them() -> None:
    model = qwen3_moe(num_experts=4)
    ignore = ["lm_head", "re:.*gate$"]
    calibration = gathered(model, [batch(model, n) for n in range(8)], ignore=ignore)
    tokens = {
        name: int(known.tokens)
        for name, known in calibration.statistics.snapshot().items()
        if "experts" in name
    }
    assert len(set(tokens.values())) > 1
    calibration.finalize(accept={"few_tokens"})
    gains = calibration.graphs.weights.compensations
    assert sum("experts" in name for name in gains) == len(tokens)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("yes", "must be true, false or a mapping"),
        ({"dampening": 0.1}, "unknown entries: dampening; use only damping"),
        ({"damping": 0}, 'damping must be "auto" or a positive number'),
        ({"damping": "Auto"}, 'damping must be "auto" or a positive number'),
        ({"damping": True}, 'damping must be "auto" or a positive number'),
        ({"keep_hessians": 1}, "keep_hessians must be true or false"),
    ],
)
def test_settings_are_checked(wanted: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        recipe(gptq=wanted)


def test_recipes_of_llm_compressor_with_gptq() -> None:
    text = """
    quant_stage:
      quant_modifiers:
        GPTQModifier:
          ignore: [lm_head]
          scheme: W4A16
          dampening_frac: 0.05
          block_size: 128
          actorder: static
    """
    found = Recipe.from_yaml(text)
    assert found.gptq == GPTQ(damping=0.05)
    assert Recipe.from_yaml(inlay.recipe.recipe_text(found)).gptq == found.gptq
    theirs = Recipe.from_yaml(text.replace("dampening_frac: 0.05", ""))
    assert theirs.gptq == GPTQ(damping=0.01)  # their default, smaller than Inlay's
    with pytest.raises(ConfigurationError, match="actorder 'group'"):
        Recipe.from_yaml(text.replace("static", "group"))
