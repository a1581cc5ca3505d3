import pytest
import torch
from compressed_tensors.quantization.lifecycle import fake_quantize
from graphs import (
    STATIC,
    TRACERS,
    Functional,
    inputs_for,
    linear,
    observed,
    ops,
    qparams_of,
    targets,
    trace,
    with_constants,
)

from inlay import Recipe
from inlay.graph import WeightOf, added_inputs
from inlay.passes import FoldQParams, Pipeline, RemoveObservers
from inlay.recipe import Plan

X = torch.randn(2, 4)


def test_docstring_example() -> None:
    model = Functional(lambda self, x: self.fc(x), fc=linear())
    plan = Plan(model, STATIC)
    gm = observed(trace("dynamo", model, X), plan)
    result = FoldQParams(qparams=qparams_of(plan, model, {"fc.input": X}))(gm)
    assert result.modified
    w = "fc.weight"
    assert ops(result.graph_module) == [
        f"observe_weight({w})  # fc.weight, by InsertObservers",
        "observe(x, …)  # fc.input, by InsertObservers",
        "quantize_dequantize = quantize_dequantize(x, …)  # by FoldQParams",
        "linear = linear(quantize_dequantize, fc.weight folded, None)",
        "return (linear)",
    ]
    added = set(map(str, added_inputs(result.graph_module.graph).values()))
    assert {"fc.weight folded", "fc.input scale", "fc.input zero_point"} <= added


@pytest.mark.parametrize("how", TRACERS)
def test_finalized_graphs_of_all_tracers_compute_the_quantized_model(how: str) -> None:
    model = Functional(lambda self, x: self.b(self.a(x).relu()) + x, a=linear(), b=linear(seed=1))
    plan = Plan(model, STATIC)
    values = {"a.input": X, "b.input": model.a(X).relu()}
    qparams = qparams_of(plan, model, values)
    gm = observed(trace(how, model, X), plan)
    final = Pipeline((FoldQParams(qparams=qparams), RemoveObservers()))(gm).graph_module
    bound = with_constants(final, plan, model, qparams)

    def quantized(slot: str, value: torch.Tensor) -> torch.Tensor:
        q = qparams[slot]
        return fake_quantize(value, q["scale"], q["zero_point"], plan.slots[slot].args)

    a = quantized("a.input", X) @ quantized("a.weight", model.a.weight).T
    b = quantized("b.input", a.relu()) @ quantized("b.weight", model.b.weight).T
    inputs = inputs_for(bound, X)
    with torch.no_grad():
        result = bound(*inputs)
        exported = torch.export.export(bound, tuple(inputs)).module()(*inputs)
    torch.testing.assert_close(_only(result), b + X)
    torch.testing.assert_close(_only(exported), b + X)
    assert not any("observe" in name for name in targets(bound))


def _only(result: torch.Tensor | tuple[torch.Tensor]) -> torch.Tensor:
    return result if isinstance(result, torch.Tensor) else result[0]


def test_one_quantization_for_all_that_share_a_value() -> None:
    model = Functional(lambda self, x: (self.q(x), self.k(x)), q=linear(), k=linear(seed=1))
    plan = Plan(model, STATIC)
    gm = observed(trace("dynamo", model, X), plan)
    qparams = qparams_of(plan, model, {"q.input": X, "k.input": X})
    final = Pipeline((FoldQParams(qparams=qparams), RemoveObservers()))(gm).graph_module
    assert targets(final) == ["quantize_dequantize", "linear", "linear"]


def test_dynamic_slots_need_no_inputs() -> None:
    model = Functional(lambda self, x: (self.q(x), self.k(x)), q=linear(), k=linear(seed=1))
    plan = Plan(model, Recipe.from_preset("W8A8"))
    gm = observed(trace("dynamo", model, X), plan)
    final = FoldQParams(qparams=qparams_of(plan, model, {}))(gm).graph_module
    assert targets(final).count("quantize_dequantize") == 1
    assert {type(i) for i in added_inputs(final.graph).values()} == {WeightOf}


def test_outputs_are_quantized_for_all_readers() -> None:
    recipe = Recipe.from_preset("W8A16", weights={"strategy": "channel"}, outputs={"num_bits": 8})
    model = Functional(lambda self, x: (self.fc(x), self.fc(x) + 1), fc=linear())
    plan = Plan(model, recipe)
    gm = observed(trace("dynamo", model, X), plan)
    qparams = qparams_of(plan, model, {"fc.output": model.fc(X)})
    final = Pipeline((FoldQParams(qparams=qparams), RemoveObservers()))(gm).graph_module
    assert targets(final) == [
        "linear",
        "quantize_dequantize",
        "linear",
        "quantize_dequantize",
        "add",
    ]
    assert ops(final)[-1] == "return (quantize_dequantize, add)"


def test_a_slot_without_qparams_stays_in_full_precision() -> None:
    model = Functional(lambda self, x: self.fc(x), fc=linear())
    plan = Plan(model, STATIC)
    gm = observed(trace("dynamo", model, X), plan)
    assert not FoldQParams(qparams={})(gm).modified


def test_second_run_changes_nothing_and_the_input_is_left_alone() -> None:
    model = Functional(lambda self, x: self.fc(x), fc=linear())
    plan = Plan(model, STATIC)
    gm = observed(trace("dynamo", model, X), plan)
    before = ops(gm)
    fold = FoldQParams(qparams=qparams_of(plan, model, {"fc.input": X}))
    once = fold(gm)
    assert ops(gm) == before
    again = fold(once.graph_module)
    assert not again.modified
    assert ops(again.graph_module) == ops(once.graph_module)


@pytest.mark.parametrize("how", TRACERS)
def test_nothing_to_fold_changes_nothing_and_folding_later_works(how: str) -> None:
    model = Functional(lambda self, x: self.fc(x), fc=linear())
    plan = Plan(model, STATIC)
    gm = observed(trace(how, model, X), plan)
    nothing = FoldQParams(qparams={})(gm)
    assert not nothing.modified
    assert nothing.graph_module.code == gm.code
    qparams = qparams_of(plan, model, {"fc.input": X})
    only_weight = FoldQParams(qparams={"fc.weight": qparams["fc.weight"]})(nothing.graph_module)
    assert only_weight.modified
    assert "quantize_dequantize" not in targets(only_weight.graph_module)
    both = FoldQParams(qparams=qparams)(only_weight.graph_module)
    assert both.modified
    assert "quantize_dequantize" in targets(both.graph_module)
    at_once = FoldQParams(qparams=qparams)(gm).graph_module
    assert sorted(targets(both.graph_module)) == sorted(targets(at_once))
