"""Each expert has the statistics of the tokens that it is given, as a loop over experts has."""

from typing import Any

import pytest
import torch
from families import WITH_EXPERTS, batch, mixtral, qwen3_moe
from routed import assert_observed, routed_rows

from inlay import Calibration, Recipe

pytestmark = pytest.mark.filterwarnings("ignore")  # what Dynamo warns of is its own

FP8 = {"ignore": ["lm_head", "re:.*[.]gate$"]}


def padded(model: Any, index: int, tokens: int) -> dict[str, Any]:
    one = batch(model, index, rows=3, tokens=tokens)
    one["attention_mask"][0, 2:] = 0
    one["attention_mask"][1, :1] = 0
    return one


def observed(model: Any, recipe: Recipe, batches: Any, **options: Any) -> Calibration:
    calibration = Calibration(model, recipe, progress=False, **{"compiler": "eager", **options})
    for one in batches:
        calibration.observe(**one)
    return calibration


def assert_each_saw_its_own(calibration: Calibration, rows: Any) -> None:
    plan = calibration.plan
    slots = [*plan.activation_slots(), *plan.importance_slots()]
    of_experts = [slot for slot in slots if slot.module in plan.experts]
    assert of_experts
    for slot in of_experts:
        known = calibration.statistics.of(slot)
        assert known is not None
        assert_observed(known, slot, rows.get(slot.module, []))


@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_each_saw_what_a_loop_over_experts_gives_it(family: str) -> None:
    model = WITH_EXPERTS[family]()
    batches = [padded(model, 0, 6), padded(model, 1, 9)]
    calibration = observed(model, Recipe.from_preset("FP8", **FP8), batches)
    assert_each_saw_its_own(calibration, routed_rows(model, batches))


def lonely(family: Any, **changes: Any) -> Any:
    """A model whose routers never choose the third expert, and give the others all tokens."""
    model = family(**changes)
    for name, router in model.named_modules():
        if name.endswith("mlp.gate"):
            router.weight.data[2] = -1.0
            router.weight.data[[0, 1, 3]] *= 1e-3
    for name, norm in model.named_modules():
        if name.endswith("post_attention_layernorm"):
            norm.register_forward_hook(lambda _, __, output: output.abs())
    return model
