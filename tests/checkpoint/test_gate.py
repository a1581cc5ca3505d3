"""The gate: what no checkpoint is written with."""

from typing import Any

import pytest
import torch
from families import llama

from inlay import Recipe
from inlay.checkpoint.gate import describe_unusable, require_servable
from inlay.errors import ConfigurationError, StatisticsError
from inlay.recipe import Plan

DOWN = "model.layers.0.mlp.down_proj"
GATE = "model.layers.1.mlp.gate_proj"
CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}


def planned(preset: str = "W8A8_STATIC", **fields: Any) -> tuple[Plan, dict[str, Any]]:
    """A plan and qparams that nothing is wrong with."""
    plan = Plan(llama(), Recipe.from_preset(preset, ignore=["lm_head"], **fields))
    good = {
        slot.name: {key: torch.ones(1) for key in slot.needed_qparams}
        for slot in plan.slots.values()
        if slot.needed_qparams
    }
    return plan, good


@pytest.mark.parametrize("preset", ["W8A8_STATIC", "W8A8", "FP8", "NVFP4", "MXFP4"])
def test_what_is_good_passes(preset: str) -> None:
    plan, qparams = planned(preset)
    assert require_servable(plan, qparams) == frozenset()


def test_what_is_needed() -> None:
    def of(plan: Plan) -> dict[str, tuple[str, ...]]:
        return {s.base_name: s.needed_qparams for s in plan.slots.values() if s.module == DOWN}

    assert of(planned("W8A8_STATIC")[0]) == {"weight": ("scale",), "input": ("scale", "zero_point")}
    assert of(planned("W8A8")[0]) == {"weight": ("scale",), "input": ()}
    assert of(planned("NVFP4")[0]) == {
        "weight": ("global_scale", "scale"),
        "input": ("global_scale",),
    }


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0.0, "1 zero"),
        (-1.0, "1 negative"),
        (float("inf"), "1 not finite"),
        (float("-inf"), "1 not finite"),
        (float("nan"), "1 not finite"),
    ],
)
@pytest.mark.parametrize("key", ["scale", "global_scale"])
def test_scales_that_cannot_be(value: float, words: str, key: str) -> None:
    plan, qparams = planned("NVFP4")
    qparams[f"{DOWN}.weight"][key] = torch.tensor([1.0, value, 2.0])
    message = rf"1 slot would.*{DOWN}\.weight \(of 3 {key}s, {words}\).*accept=\{{\"not_finite\"\}}"
    with pytest.raises(StatisticsError, match=message):
        require_servable(plan, qparams)
    assert require_servable(plan, qparams, accept={"not_finite"}) == {DOWN}


def test_a_zero_point_may_be_zero_but_not_nan() -> None:
    assert describe_unusable("zero_point", torch.tensor([0.0, -3.0])) is None
    assert describe_unusable("zero_point", torch.tensor([float("nan")])) is not None


@pytest.mark.parametrize("accept", ["unobserved", "not_finite"])
def test_a_slot_that_saw_nothing(accept: str) -> None:
    plan, qparams = planned()
    del qparams[f"{DOWN}.input"], qparams[f"{GATE}.input"]["zero_point"]
    with pytest.raises(StatisticsError, match="2 slots would") as caught:
        require_servable(plan, qparams)
    for name in (DOWN, GATE):
        assert f"{name}.input (no usable data" in str(caught.value)
    assert 'accept={"unobserved"}' in str(caught.value)
    found = require_servable(plan, qparams, accept={accept, "unfused"})
    assert found == {DOWN, GATE}


def test_a_weight_is_always_seen_so_it_is_not_unobserved() -> None:
    plan, qparams = planned()
    del qparams[f"{DOWN}.weight"]
    with pytest.raises(StatisticsError, match=r'accept=\{"not_finite"\}'):
        require_servable(plan, qparams, accept={"unobserved"})


def test_fused_layers_share_their_global_scale() -> None:
    plan, qparams = planned("NVFP4")
    qparams[f"{GATE}.weight"]["global_scale"] = torch.tensor([2.0])
    message = (
        r"model\.layers\.1\.mlp\.\{gate_proj: global scale 2, up_proj: global scale 1\} \(weight\)"
        r'.*accept=\{"unfused"\}'
    )
    with pytest.raises(StatisticsError, match=message):
        require_servable(plan, qparams)
    assert require_servable(plan, qparams, accept={"unfused"}) == frozenset()


def test_fused_layers_are_in_full_precision_together() -> None:
    plan, qparams = planned()
    del qparams[f"{GATE}.input"]
    with pytest.raises(StatisticsError, match="gate_proj: full precision, up_proj: no global"):
        require_servable(plan, qparams, accept={"unobserved"})


def test_attention_is_quantized_in_all_layers_or_in_none() -> None:
    plan, qparams = planned(kv_cache=CACHE)
    del qparams["model.layers.1.self_attn.k"]
    with pytest.raises(StatisticsError, match=r"1\.self_attn\.k.*leave kv_cache and attention tar"):
        require_servable(plan, qparams, accept={"unobserved", "not_finite"})


def test_something_must_be_left() -> None:
    plan, _ = planned()
    with pytest.raises(StatisticsError, match="no module has usable scales"):
        require_servable(plan, {}, accept={"not_finite"})


def test_words_that_are_not_known() -> None:
    plan, qparams = planned()
    with pytest.raises(ConfigurationError, match=r"accept everything; .*unobserved: .*not_f"):
        require_servable(plan, qparams, accept={"everything"})
