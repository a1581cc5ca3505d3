"""Graphs that write in place: what is observed and quantized is what each op reads."""

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graphs import STATIC, TRACERS, Functional, linear, observed, targets, trace
from specification import Inputs, assert_same_qparams, quantized_copy
from torch import nn
from torch.fx import Graph, GraphModule, Node

from inlay import Calibration, Recipe
from inlay.graph import mutates, observes
from inlay.nodes.observe import Observe
from inlay.passes import Annotate, InsertObservers, Pipeline, PruneUnobserved, ShareObservers
from inlay.recipe import Plan

X = torch.linspace(-1, 1, 8).reshape(2, 4)


def add_100(y: torch.Tensor) -> None:
    y.add_(100)


def through_a_view(y: torch.Tensor) -> None:
    y.view(-1).add_(100)


def through_a_slice(y: torch.Tensor) -> None:
    y[0, 1:].mul_(100)


def set_item(y: torch.Tensor) -> None:
    y[0] = 100.0


def augmented(y: torch.Tensor) -> None:
    y += 100


def given_as_out(y: torch.Tensor) -> None:
    torch.add(y, 100, out=y)


def of_functional(y: torch.Tensor) -> None:
    F.threshold(y, 10.0, 100.0, inplace=True)


def through_a_chunk(y: torch.Tensor) -> None:
    first, _ = y.chunk(2, dim=-1)
    first.fill_(100.0)


WRITES = [
    add_100, through_a_view, through_a_slice, set_item, augmented, given_as_out, of_functional,
    through_a_chunk,
]  # fmt: skip


def groups(gm: GraphModule) -> list[list[str]]:
    return [[s.name for s in observes(n)] for n in gm.graph.nodes if isinstance(n.target, Observe)]


def two_readers(write: Callable[[torch.Tensor], None]) -> nn.Module:
    def forward(self, x):
        y = x * 2
        first = self.a(y)
        write(y)
        return first + self.b(y)

    return Functional(forward, a=linear(), b=linear(seed=1))


def one_module_twice(write: Callable[[torch.Tensor], None]) -> nn.Module:
    def forward(self, x):
        y = x * 2
        first = self.a(y)
        write(y)
        return first + self.a(y)

    return Functional(forward, a=linear())


def not_traceable(write: Any, how: str) -> bool:
    """`symbolic_trace` cannot record an item that is set, and `y += 1` rebinds its argument."""
    return how == "symbolic_trace" and write in (set_item, augmented, through_a_chunk)


CASES = [(write, how) for write in WRITES for how in TRACERS if not not_traceable(write, how)]


@pytest.mark.parametrize(("write", "how"), CASES)
def test_a_value_written_to_in_between_is_not_shared(write: Any, how: str) -> None:
    model = two_readers(write)
    gm = observed(trace(how, model, X), Plan(model, STATIC))
    assert groups(gm) == [["a.input"], ["b.input"]]


@pytest.mark.parametrize(("write", "how"), CASES)
def test_a_module_called_again_after_a_write_is_observed_again(write: Any, how: str) -> None:
    model = one_module_twice(write)
    gm = observed(trace(how, model, X), Plan(model, STATIC))
    assert groups(gm) == [["a.input"], ["a.input"]]
    for step in (InsertObservers(), ShareObservers()):
        assert not step(gm).modified


def test_a_write_to_something_else_changes_nothing() -> None:
    def forward(self, x):
        y = x * 2
        first = self.a(y)
        first.add_(1)
        return first + self.b(y)

    model = Functional(forward, a=linear(), b=linear(seed=1))
    for how in TRACERS:
        assert groups(observed(trace(how, model, X), Plan(model, STATIC))) == [
            ["a.input", "b.input"]
        ]


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
@pytest.mark.parametrize("make", [two_readers, one_module_twice])
@pytest.mark.parametrize("write", [add_100, through_a_view, set_item])
def test_statistics_and_quantized_values_are_those_of_eager_modules(
    write: Any, make: Any, compiler: str
) -> None:
    torch._dynamo.reset()
    model = make(write)
    inputs = Inputs(model, STATIC)
    with torch.no_grad():
        model(X)
    inputs.remove()
    calibration = Calibration(model, STATIC, compiler=compiler)
    calibration.observe(X)
    qparams = calibration.finalize()
    assert_same_qparams(qparams, {n: o.get_qparams() for n, o in inputs.observers.items()})
    compiled = torch.compile(model, backend=calibration.backend)
    with torch.no_grad():
        assert torch.equal(compiled(X), quantized_copy(model, qparams, STATIC)(X))


def test_dynamic_scales_are_computed_again_after_a_write() -> None:
    torch._dynamo.reset()
    model = two_readers(add_100)
    calibration = Calibration(model, Recipe.from_preset("W8A8"), compiler="eager")
    calibration.finalize()
    compiled = torch.compile(model, backend=calibration.backend)
    with torch.no_grad():
        found, plain = compiled(X), model(X)
    torch.testing.assert_close(found, plain, rtol=0.05, atol=1.0)


def test_slots_that_see_more_than_others_are_not_shared() -> None:
    def forward(self, x):
        return self.a(x) + self.b(x) + self.a(x * 3)

    torch._dynamo.reset()
    model = Functional(forward, a=linear(), b=linear(seed=1))
    assert groups(observed(trace("dynamo", model, X), Plan(model, STATIC))) == [
        ["a.input"],
        ["b.input"],
        ["a.input"],
    ]
    inputs = Inputs(model, STATIC)
    with torch.no_grad():
        model(X)
    inputs.remove()
    calibration = Calibration(model, STATIC, compiler="eager")
    calibration.observe(X)
    expected = {name: o.get_qparams() for name, o in inputs.observers.items()}
    assert_same_qparams(calibration.finalize(), expected)


@pytest.mark.parametrize(("write", "how"), CASES)
def test_writes_stay_where_outputs_go(write: Any, how: str) -> None:
    def forward(self, x):
        y = self.a(x) * 2
        write(y)
        return self.b(y).exp()

    model = Functional(forward, a=linear(), b=linear(seed=1)).requires_grad_(False)
    plan = Plan(model, STATIC)
    gm = observed(trace(how, model, X), plan)
    pruned = PruneUnobserved()(gm).graph_module
    written = [str(n.target) for n in gm.graph.nodes if mutates(n)]
    assert written
    assert [str(n.target) for n in pruned.graph.nodes if mutates(n)] == written
    assert not any("exp" in name for name in targets(pruned))


def node(target: Any, *args: Any, **kwargs: Any) -> Node:
    graph = Graph()
    values = [graph.placeholder(f"x{i}") for i in range(3)]
    op = graph.call_method if isinstance(target, str) else graph.call_function
    return op(
        target, (*values[:2], *args), {k: values[2] if v is X else v for k, v in kwargs.items()}
    )


@pytest.mark.parametrize(
    "target",
    [
        "add_", "copy_", "__setitem__", "__iadd__", operator.setitem, operator.iadd,
        operator.imul, torch.relu_, F.relu_, torch.ops.aten.add_.Tensor,
        torch.ops.aten.index_put_.default, torch.ops.aten.add_,
    ],
)  # fmt: skip
def test_ops_that_write(target: Any) -> None:
    assert mutates(node(target))


def test_arguments_that_make_an_op_write() -> None:
    assert mutates(node(torch.add, out=X))
    assert mutates(node(torch.ops.aten.add.out, out=X))
    assert mutates(node(torch.ops.aten.add, out=X))
    assert mutates(node(F.relu, inplace=True))
    assert not mutates(node(torch.add, out=None))
    assert not mutates(node(F.relu, inplace=False))


@pytest.mark.parametrize(
    "target",
    [
        "add", "__add__", "__getitem__", operator.add, operator.getitem, operator.invert,
        operator.index, torch.relu, F.linear, torch.ops.aten.add.Tensor, torch.ops.aten.add,
        torch.ops.aten.mean, torch.ops.aten.numpy_T,
    ],
)  # fmt: skip
def test_ops_that_do_not_write(target: Any) -> None:
    assert not mutates(node(target))


@pytest.mark.parametrize("writes", [False, True])
def test_ops_that_run_graphs_write_if_these_do(writes: bool) -> None:
    def body(target: str) -> GraphModule:
        graph = Graph()
        x = graph.placeholder("x")
        graph.output((graph.call_method(target, (x, 1)),))
        return GraphModule({}, graph)

    graph = Graph()
    p, x = graph.placeholder("p"), graph.placeholder("x")
    branches = [graph.get_attr(name) for name in ("then", "otherwise")]
    call = graph.call_function(torch.ops.higher_order.cond, (p, *branches, (x,)))
    graph.output(call)
    root = {"then": body("add"), "otherwise": body("add_" if writes else "sub")}
    gm = GraphModule(root, graph)
    (found,) = [n for n in gm.graph.nodes if n.op == "call_function"]
    assert mutates(found) == writes
    pruned = PruneUnobserved()(gm).graph_module
    assert bool(targets(pruned)) == writes


def test_annotate_and_insert_alone_leave_values_alone() -> None:
    model = two_readers(add_100)
    gm = trace("export", model, X)
    plan = Plan(model, STATIC)
    inserted = Pipeline((Annotate(plan=plan), InsertObservers()))(gm).graph_module
    assert groups(inserted) == [["a.input"], ["b.input"]]
