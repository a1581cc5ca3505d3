"""Ops that run graphs, and transforms such as `vmap`: no pass harms them; some are left alone."""

from typing import Any

import pytest
import torch
from families import batch, mamba
from graphs import STATIC, Functional, inputs_for, linear, ops, targets, trace
from specification import assert_same_qparams, expected_qparams, quantized_copy
from torch import nn
from torch.fx import Graph, GraphModule
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

from inlay import Calibration, Recipe
from inlay.graph import enclosed_slots, observes
from inlay.passes import (
    PREPARE,
    Annotate,
    FoldQParams,
    InlineCalls,
    InsertObservers,
    LeaveOutPadding,
    OutlineRepeats,
    Pipeline,
    RemoveObservers,
    ShareObservers,
)
from inlay.recipe import Plan

# The plain model is what graphs are compared with.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
]

X = torch.linspace(-1, 1, 12).reshape(3, 4)


def a_cond(fc: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, lambda y: fc(y), lambda y: fc(y) * 2, (x,))


def a_while_loop(fc: nn.Module, x: torch.Tensor) -> torch.Tensor:
    from torch._higher_order_ops import while_loop

    start = (torch.zeros((), dtype=torch.int64), x)
    return while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, fc(y)), start)[1]


def a_map(fc: nn.Module, x: torch.Tensor) -> torch.Tensor:
    from torch._higher_order_ops import map

    return map(lambda row: fc(row), x)


def a_scan(fc: nn.Module, x: torch.Tensor) -> torch.Tensor:
    from torch._higher_order_ops import scan

    return scan(lambda carry, row: (carry + 1, fc(row) + carry), torch.zeros(4), x)[1]


def a_vmap(fc: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.vmap(fc)(x)


def an_associative_scan(fc: nn.Module, x: torch.Tensor) -> torch.Tensor:
    from torch._higher_order_ops import associative_scan

    return associative_scan(lambda a, b: a * b, fc(x), 0, combine_mode="generic")


def flex(fc: nn.Module, x: torch.Tensor) -> torch.Tensor:
    q = fc(x).reshape(1, 1, 3, 4)
    return flex_attention(q, q, q, score_mod=lambda score, b, h, i, j: score * 2).reshape(3, 4)


def a_checkpoint(fc: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(lambda y: fc(y).relu(), x, use_reentrant=False)


def a_gradient(fc: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.func.grad(lambda y: fc(y).pow(2).sum())(x)


LEFT_ALONE = {
    a_cond: "cond (cond), and which branch runs depends on data",
    a_while_loop: "while_loop (while_loop), and how often it runs depends on data",
    a_map: "map (map_impl), and it sees one slice of a value at a time",
    a_scan: "scan (scan), and it sees one slice of a value at a time",
    a_vmap: "vmap (_vmap_increment_nesting), and it sees one item of a batch at a time",
    a_gradient: "grad (_grad_increment_nesting), and values that are being differentiated cannot "
    "be written to a state",
}
OBSERVED = [an_associative_scan, flex, a_checkpoint]


class Blocks(nn.Module):
    """Blocks that each do the same to the output of a plain layer."""

    def __init__(self, op: Any) -> None:
        super().__init__()
        self.first = linear(seed=5)
        self.layers = nn.ModuleList(Functional(self._forward, fc=linear(seed=i)) for i in range(2))
        self.op = op
        self.requires_grad_(False)

    def _forward(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return self.op(layer.fc, x) + 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x


def traceable(op: Any, how: str) -> bool:
    return not (how == "export" and op is a_gradient)  # torch.export refuses it


CASES = [
    (op, how) for op in (*LEFT_ALONE, *OBSERVED) for how in ("dynamo", "export")
    if traceable(op, how)
]  # fmt: skip


@pytest.mark.parametrize(("op", "how"), CASES)
def test_no_pass_harms_it(op: Any, how: str) -> None:
    model = Blocks(op)
    plan = Plan(model, STATIC)
    gm = trace(how, model, X)
    with torch.no_grad():
        expected = model(X)
        for step in (InlineCalls(), Annotate(plan=plan), OutlineRepeats()):
            result = step(gm)
            again = step(result.graph_module)
            assert not again.modified, step
            assert ops(again.graph_module) == ops(result.graph_module)
            (found,) = _all(result.graph_module(*inputs_for(result.graph_module, X)))
            assert torch.equal(found, expected), step
            gm = gm if isinstance(step, OutlineRepeats) else result.graph_module
        observing = (InsertObservers(), ShareObservers(), LeaveOutPadding())
        gm = Pipeline(observing)(gm).graph_module
        final = Pipeline((FoldQParams(qparams={}), RemoveObservers()))(gm).graph_module
        (found,) = _all(final(*inputs_for(final, X)))
    assert torch.equal(found, expected)


@pytest.mark.parametrize(("op", "how"), [case for case in CASES if case[0] in LEFT_ALONE])
def test_slots_inside_are_listed(op: Any, how: str) -> None:
    model = Functional(lambda self, x: op(self.fc, x), fc=linear()).requires_grad_(False)
    plan = Plan(model, STATIC)
    gm = trace(how, model, X)
    assert [str(one) for one in enclosed_slots(gm, plan)] == [
        f"fc.weight is not folded into the graph: its op stands inside {LEFT_ALONE[op]}",
        f"fc.input is not observed: its op stands inside {LEFT_ALONE[op]}",
    ]
    prepared = Pipeline.of(PREPARE, plan=plan)(gm).graph_module
    assert not any(observes(node) for node in prepared.graph.nodes)


def test_a_slot_that_is_observed_elsewhere_too() -> None:
    model = Functional(lambda self, x: self.fc(a_cond(self.fc, x)), fc=linear())
    found = enclosed_slots(trace("dynamo", model, X), Plan(model, STATIC))
    assert [str(one) for one in found] == [
        "fc.weight is not folded into the graph in cond (cond), only elsewhere: which branch runs "
        "depends on data",
        "fc.input is not observed in cond (cond), only elsewhere: which branch runs depends on "
        "data",
    ]


def test_an_op_in_a_branch_of_a_branch() -> None:
    def forward(self, x):
        def inner(y):
            return torch.cond(y.max() > 0, lambda z: self.fc(z), lambda z: z * 2, (y,))

        return torch.cond(x.sum() > 0, inner, lambda y: y * 3, (x,))

    model = Functional(forward, fc=linear())
    found = enclosed_slots(trace("dynamo", model, X), Plan(model, STATIC))
    assert [(one.slot.name, one.inside) for one in found] == [
        ("fc.weight", "cond (cond)"),
        ("fc.input", "cond (cond)"),
    ]


def test_operands_of_a_scan_that_only_a_gpu_runs() -> None:
    body = Graph()
    a, b, w = (body.placeholder(name) for name in "abw")
    body.output([body.call_function(nn.functional.linear, (body.call_method("mul", (a, b)), w))])
    graph = Graph()
    x, w = graph.placeholder("x"), graph.get_attr("fc.weight")
    scan = torch.ops.higher_order.associative_scan
    call = graph.call_function(scan, (graph.get_attr("combine"), [x], (w,)))
    graph.output(call)
    model = Functional(lambda self, x: self.fc(x), fc=linear())
    model.combine = GraphModule({}, body)
    found = enclosed_slots(GraphModule(model, graph), Plan(model, STATIC))
    assert [one.slot.name for one in found] == ["fc.weight", "fc.input"]
    assert found[0].inside == "associative_scan (associative_scan)"


def test_what_is_observed_is_not_listed() -> None:
    for op in OBSERVED:
        model = Blocks(op)
        plan = Plan(model, STATIC)
        gm = InlineCalls()(trace("dynamo", model, X)).graph_module
        assert enclosed_slots(gm, plan) == []


@pytest.mark.parametrize("op", [*LEFT_ALONE, *OBSERVED])
def test_calibration(op: Any) -> None:
    torch._dynamo.reset()
    model = Blocks(op)
    calibration = Calibration(model, STATIC, compiler="aot_eager")
    compiled = torch.compile(model, backend=calibration.backend)
    with torch.no_grad():
        expected = model(X)
        calibration.observe(X)
        torch.testing.assert_close(compiled(X), expected)
        qparams = calibration.finalize(accept=["unobserved"])
        quantized = compiled(X)
        assert not torch.equal(quantized, expected)
        observed = {name for name in qparams if name.endswith(".input")}
        layers = {f"layers.{index}.fc.input" for index in range(2)}
        explained = calibration.explain()
        if op in OBSERVED:
            assert observed == {"first.input", *layers}
            assert "its op stands inside" not in explained
            reference = quantized_copy(model, qparams, STATIC)(X)
            torch.testing.assert_close(quantized, reference)
        else:
            assert observed == {"first.input"}
            for name in layers:
                assert f"{name} is not observed: its op stands inside" in explained


def test_branches_that_differ_are_not_the_same_block() -> None:
    class Different(Blocks):
        def _forward(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
            factor = 2 if layer is self.layers[0] else 3
            then = torch.cond(x.sum() > 0, lambda y: y * factor, lambda y: y - 1, (x,))
            return layer.fc(then)

    for model, bodies in ((Different(a_cond), 3), (Blocks(a_cond), 2)):
        outlined = OutlineRepeats()(trace("dynamo", model, X)).graph_module
        called = [str(n.target) for n in outlined.graph.find_nodes(op="call_module")]
        assert len(called) == 3
        assert len(set(called)) == bodies
        assert "cond" not in targets(outlined)
        assert not outlined.graph.find_nodes(op="get_attr")
        with torch.no_grad():
            (found,) = outlined(*inputs_for(outlined))
            assert torch.equal(found, model(X))


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
def test_mamba() -> None:
    torch._dynamo.reset()
    model = mamba()
    # Their weights are used without calling them.
    uncalled = [name for name, _ in model.named_modules() if name.endswith("dt_proj")]
    config = STATIC.config.model_copy(update={"ignore": ["lm_head", *uncalled]})
    recipe = Recipe.from_config(config)
    batches = [{"input_ids": batch(model, index)["input_ids"]} for index in range(2)]
    calibration = Calibration(model, recipe, compiler="aot_eager")
    for one in batches:
        calibration.observe(**one)
    qparams = calibration.finalize()
    expected = expected_qparams(model, recipe, batches)
    assert len(expected) == 6
    assert_same_qparams(qparams, expected)
    compiled = torch.compile(model, backend=calibration.backend)
    with torch.no_grad():
        found = compiled(**batches[0]).logits
        assert torch.equal(found, quantized_copy(model, qparams, recipe)(**batches[0]).logits)


def _all(result: Any) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)
