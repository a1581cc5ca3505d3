"""Products with a transposed weight are matched like `linear`, however they are written."""

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
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
from torch import nn

from inlay import Recipe
from inlay.graph import observes, slots_of
from inlay.passes import FoldQParams, Pipeline, RemoveObservers
from inlay.recipe import Plan

X = torch.linspace(-1, 2, 16).reshape(4, 4)
B = torch.arange(4.0)

aten = torch.ops.aten
Spelling = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

PRODUCTS: dict[str, Spelling] = {
    "@": lambda x, w: x @ w.T,
    "operator.matmul": lambda x, w: operator.matmul(x, w.T),
    "@=": lambda x, w: operator.imatmul(x, w.T),
    "torch.matmul": lambda x, w: torch.matmul(x, w.T),
    "torch.matmul by name": lambda x, w: torch.matmul(input=x, other=w.T),
    "torch.mm": lambda x, w: torch.mm(x, w.T),
    "torch.mm by name": lambda x, w: torch.mm(x, mat2=w.T),
    "torch.linalg.matmul": lambda x, w: torch.linalg.matmul(x, w.T),
    "method matmul": lambda x, w: x.matmul(w.T),
    "method mm": lambda x, w: x.mm(w.T),
    "method __matmul__": lambda x, w: x.__matmul__(w.T),
    "aten.mm": lambda x, w: aten.mm.default(x, w.T),
    "aten.matmul": lambda x, w: aten.matmul.default(x, w.T),
}
SUMS: dict[str, Spelling] = {
    "torch.addmm": lambda x, w: torch.addmm(B, x, w.T),
    "torch.addmm by name": lambda x, w: torch.addmm(B, mat1=x, mat2=w.T),
    "aten.addmm": lambda x, w: aten.addmm.default(B, x, w.T),
}
TRANSPOSES: dict[str, Spelling] = {
    ".t()": lambda x, w: x @ w.t(),
    "torch.t": lambda x, w: x @ torch.t(w),
    ".mT": lambda x, w: x @ w.mT,
    ".H": lambda x, w: x @ w.H,
    "adjoint": lambda x, w: x @ w.adjoint(),
    "transpose(0, 1)": lambda x, w: x @ w.transpose(0, 1),
    "transpose(1, 0)": lambda x, w: x @ w.transpose(1, 0),
    "transpose(-1, -2)": lambda x, w: x @ w.transpose(-1, -2),
    "transpose(-2, -1)": lambda x, w: x @ w.transpose(-2, -1),
    "torch.transpose": lambda x, w: x @ torch.transpose(w, 0, 1),
    "torch.transpose by name": lambda x, w: x @ torch.transpose(input=w, dim0=0, dim1=1),
    "swapaxes": lambda x, w: x @ w.swapaxes(0, 1),
    "torch.swapdims": lambda x, w: x @ torch.swapdims(w, 1, 0),
    "movedim": lambda x, w: x @ w.movedim(0, 1),
    "permute(1, 0)": lambda x, w: x @ w.permute(1, 0),
    "permute((1, 0))": lambda x, w: x @ w.permute((1, 0)),
    "permute(-1, 0)": lambda x, w: x @ w.permute(-1, 0),
    "torch.permute": lambda x, w: x @ torch.permute(w, (1, 0)),
    "getattr": lambda x, w: x @ getattr(w, "T"),  # noqa: B009
    ".mH": lambda x, w: x @ w.mH,
    "torch.adjoint": lambda x, w: x @ torch.adjoint(w),
    "moveaxis": lambda x, w: x @ w.moveaxis(0, 1),
    "aten.t": lambda x, w: aten.mm.default(x, aten.t.default(w)),
    "aten.t, any overload": lambda x, w: aten.mm(x, aten.t(w)),
    "aten.transpose, any overload": lambda x, w: x @ aten.transpose(w, 0, 1),
    "aten.numpy_T": lambda x, w: x @ aten.numpy_T.default(w),
    # Dynamo writes .T, .mT, .H and .mH like this from torch 2.15 on.
    "aten.numpy_T, any overload": lambda x, w: x @ aten.numpy_T(w),
    "aten.mT, any overload": lambda x, w: x @ aten.mT(w),
    "aten.matrix_H, any overload": lambda x, w: x @ aten.matrix_H(w),
    "aten.mH, any overload": lambda x, w: x @ aten.mH(w),
    "aten.permute": lambda x, w: aten.mm.default(x, aten.permute.default(w, [1, 0])),
}
OTHERS: dict[str, Spelling] = {
    "not transposed": lambda x, w: x @ w,
    "permute(0, 1)": lambda x, w: x @ w.permute(0, 1),
    "transpose(0, 0)": lambda x, w: x @ w.transpose(0, 0),
    "transposed twice": lambda x, w: x @ w.T.T,
    "transposed twice by aten": lambda x, w: x @ aten.mT(aten.numpy_T(w)),
    "another tensor": lambda x, w: x @ (w * 2).T,
    "weight on the left": lambda x, w: w.T @ x,
    "sum of a transpose": lambda x, w: torch.addmm(w.T, x, x),
}


def spelled(spelling: Spelling, fc: nn.Linear | None = None) -> nn.Module:
    return Functional(lambda self, x: spelling(x, self.fc.weight), fc=fc or linear())


def quantized(plan: Plan, slot: str, value: torch.Tensor, qparams: Any) -> torch.Tensor:
    q = qparams[slot]
    return fake_quantize(value, q["scale"], q["zero_point"], plan.slots[slot].args)


def annotations(gm: Any) -> list[list[str]]:
    return [sorted(s.name for s in slots_of(n).values()) for n in gm.graph.nodes if slots_of(n)]


@pytest.mark.parametrize("how", TRACERS)
@pytest.mark.parametrize("spelling", [*PRODUCTS, *SUMS, *TRANSPOSES])
def test_every_spelling_is_observed_and_folded(spelling: str, how: str) -> None:
    model = spelled({**PRODUCTS, **SUMS, **TRANSPOSES}[spelling])
    plan = Plan(model, STATIC)
    gm = observed(trace(how, model, X), plan)
    assert annotations(gm) == [["fc.input", "fc.weight"]]
    seen = {s.name: node.args[0] for node in gm.graph.nodes for s in observes(node)}
    assert seen["fc.weight"].op in ("placeholder", "get_attr")
    qparams = qparams_of(plan, model, {"fc.input": X})
    final = Pipeline((FoldQParams(qparams=qparams), RemoveObservers()))(gm).graph_module
    bound = with_constants(final, plan, model, qparams)
    with torch.no_grad():
        (found,) = _all(bound(*inputs_for(bound, X)))
    x = quantized(plan, "fc.input", X, qparams)
    w = quantized(plan, "fc.weight", model.fc.weight, qparams)
    expected = F.linear(x, w) + (B if spelling in SUMS else 0)
    torch.testing.assert_close(found, expected)
    assert not torch.allclose(expected, F.linear(X, model.fc.weight), atol=1e-4)


@pytest.mark.parametrize("how", TRACERS)
@pytest.mark.parametrize("spelling", OTHERS)
def test_other_products_are_left_alone(spelling: str, how: str) -> None:
    model = spelled(OTHERS[spelling])
    assert annotations(observed(trace(how, model, X), Plan(model, STATIC))) == []


def test_a_function_of_the_users_own_is_not_taken_for_torchs() -> None:
    def t(w: torch.Tensor) -> torch.Tensor:
        return w

    graph = torch.fx.Graph()
    x, w = graph.placeholder("x"), graph.get_attr("fc.weight")
    graph.output(graph.call_function(operator.matmul, (x, graph.call_function(t, (w,)))))
    model = spelled(PRODUCTS["@"])
    gm = torch.fx.GraphModule(model, graph)
    assert annotations(observed(gm, Plan(model, STATIC))) == []


def test_the_weight_of_an_embedding_is_not_that_of_a_linear() -> None:
    model = Functional(lambda self, x: x @ self.embed.weight.T, embed=nn.Embedding(4, 4))
    recipe = Recipe.from_preset("W8A16", targets=["Embedding"], weights={"strategy": "channel"})
    assert annotations(observed(trace("dynamo", model, X), Plan(model, recipe))) == []


def test_other_readers_of_a_transpose_keep_the_old_one() -> None:
    def forward(self, x):
        transpose = self.fc.weight.t()
        return x @ transpose, transpose + 1

    model = Functional(forward, fc=linear())
    plan = Plan(model, STATIC)
    gm = observed(trace("dynamo", model, X), plan)
    qparams = qparams_of(plan, model, {"fc.input": X})
    final = Pipeline((FoldQParams(qparams=qparams), RemoveObservers()))(gm).graph_module
    assert ops(final) == [
        "transpose = t(fc.weight)",
        "transpose_1 = t(fc.weight folded)  # by FoldQParams",
        "quantize_dequantize = quantize_dequantize(x, …)  # by FoldQParams",
        "matmul = matmul(quantize_dequantize, transpose_1)",
        "add = add(transpose, 1)",
        "return (matmul, add)",
    ]


def test_a_transpose_that_nobody_reads_any_more_goes() -> None:
    model = spelled(TRANSPOSES[".t()"])
    plan = Plan(model, STATIC)
    gm = observed(trace("dynamo", model, X), plan)
    fold = FoldQParams(qparams=qparams_of(plan, model, {"fc.input": X}))
    once = Pipeline((fold, RemoveObservers()))(gm).graph_module
    assert targets(once) == ["t", "quantize_dequantize", "matmul"]
    assert not fold(once).modified


@pytest.mark.parametrize("how", TRACERS)
def test_the_output_of_a_module_includes_its_bias(how: str) -> None:
    class WithBias(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.weight.T + self.bias

    torch.manual_seed(0)
    model = Functional(lambda self, x: self.fc(x).relu() + x, fc=WithBias(4, 4))
    nn.init.constant_(model.fc.bias, 3.0)
    recipe = Recipe.from_preset("W8A16", weights={"strategy": "channel"}, outputs={"num_bits": 8})
    plan = Plan(model, recipe)
    gm = _traced_through(model) if how == "symbolic_trace" else trace(how, model, X)
    gm = observed(gm, plan)
    (observe,) = [n for n in gm.graph.nodes if "fc.output" in {s.name for s in observes(n)}]
    assert str(observe.args[0].name).startswith("add")
    qparams = qparams_of(plan, model, {"fc.output": model.fc(X)})
    final = Pipeline((FoldQParams(qparams=qparams), RemoveObservers()))(gm).graph_module
    bound = with_constants(final, plan, model, qparams)
    with torch.no_grad():
        (found,) = _all(bound(*inputs_for(bound, X)))
        w = quantized(plan, "fc.weight", model.fc.weight, qparams)
        y = quantized(plan, "fc.output", F.linear(X, w, model.fc.bias), qparams)
    torch.testing.assert_close(found, y.relu() + X)


def _traced_through(model: nn.Module) -> torch.fx.GraphModule:
    """`symbolic_trace` that goes into modules which are Linear by class."""
    from inlay.graph import propagate_shapes

    class Through(torch.fx.Tracer):
        def is_leaf_module(self, module: nn.Module, name: str) -> bool:
            return False

    return propagate_shapes(torch.fx.GraphModule(model, Through().trace(model)), X)


def _all(result: Any) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


@pytest.mark.parametrize("how", TRACERS)
def test_what_is_added_to_a_product_is_not_quantized(how: str) -> None:
    model = spelled(lambda x, w: torch.addmm(x, x, w.T))
    plan = Plan(model, STATIC)
    gm = observed(trace(how, model, X), plan)
    qparams = qparams_of(plan, model, {"fc.input": X})
    final = Pipeline((FoldQParams(qparams=qparams), RemoveObservers()))(gm).graph_module
    bound = with_constants(final, plan, model, qparams)
    with torch.no_grad():
        (found,) = _all(bound(*inputs_for(bound, X)))
    x = quantized(plan, "fc.input", X, qparams)
    w = quantized(plan, "fc.weight", model.fc.weight, qparams)
    torch.testing.assert_close(found, X + F.linear(x, w))
