import operator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graphs import (
    STATIC,
    Functional,
    dynamo_graph,
    linear,
    observed,
    ops,
    targets,
    trace,
)
from specification import Inputs, assert_same_qparams, quantized_copy
from torch import nn
from torch.fx import Graph, GraphModule
from torch.utils.checkpoint import checkpoint

from inlay import Calibration
from inlay.graph import fake_value, module_path, observes
from inlay.passes import InlineCalls, OutlineRepeats
from inlay.recipe import Plan

X = torch.linspace(-1, 1, 8).reshape(2, 4)
W = linear().weight.detach()


def calling(body: GraphModule, target: Any = torch.ops.higher_order.invoke_subgraph) -> GraphModule:
    """A graph that does nothing but call another one, and return its first result."""
    graph = Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    name = ("body",) if target is torch.ops.higher_order.invoke_subgraph else ()
    call = graph.call_function(target, (graph.get_attr("body"), *name, x, w))
    graph.output(graph.call_function(operator.getitem, (call, 0)))
    return GraphModule({"body": body}, graph)


def linear_and_relu() -> GraphModule:
    body = Graph()
    x, w = body.placeholder("x"), body.placeholder("w")
    body.output((body.call_method("relu", (body.call_function(F.linear, (x, w)),)),))
    return GraphModule({}, body)


class Block(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.fc = linear(seed=seed)

    @torch.compiler.nested_compile_region
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x).relu()


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(seed) for seed in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_docstring_example() -> None:
    gm = calling(linear_and_relu())
    assert ops(gm) == [
        "body = body()",
        "invoke_subgraph = invoke_subgraph(body, 'body', x, w)",
        "getitem = getitem(invoke_subgraph, 0)",
        "return getitem",
    ]
    result = InlineCalls()(gm)
    assert result.modified
    assert ops(result.graph_module) == [
        "linear = linear(x, w)  # by InlineCalls",
        "relu = relu(linear)  # by InlineCalls",
        "return relu",
    ]
    assert torch.equal(result.graph_module(X, W), F.linear(X, W).relu())


def test_calls_inside_calls() -> None:
    inner = calling(linear_and_relu(), torch.ops.higher_order.tag_activation_checkpoint)
    (output,) = inner.graph.find_nodes(op="output")
    output.args = ((output.args[0],),)
    inlined = InlineCalls()(calling(inner)).graph_module
    assert targets(inlined) == ["linear", "relu"]
    assert torch.equal(inlined(X, W), F.linear(X, W).relu())


def test_values_without_data_and_modules_are_kept() -> None:
    gm, _ = dynamo_graph(Stack(), X)
    inlined = InlineCalls()(gm).graph_module
    assert [n for n in gm.graph.nodes if n.op == "get_attr"]
    found = [
        (str(getattr(n.target, "__name__", n.target)), module_path(n), tuple(fake_value(n).shape))
        for n in inlined.graph.nodes
        if n.op in ("call_function", "call_method")
    ]
    assert found == [
        item
        for index in range(3)
        for item in (
            ("linear", f"layers.{index}.fc", (2, 4)),
            ("relu", f"layers.{index}", (2, 4)),
        )
    ]


def test_identical_blocks_are_still_one_body_afterwards() -> None:
    gm, inputs = dynamo_graph(Stack(), X)
    outlined = OutlineRepeats()(InlineCalls()(gm).graph_module).graph_module
    called = [str(n.target) for n in outlined.graph.find_nodes(op="call_module")]
    assert called == ["outlined_0"] * 3
    with torch.no_grad():
        assert torch.equal(outlined(*inputs)[0], gm(*inputs)[0])


def test_checkpoints() -> None:
    model = Functional(
        lambda self, x: checkpoint(lambda y: self.fc(y).relu(), x, use_reentrant=False),
        fc=linear(),
    )
    gm, inputs = dynamo_graph(model, X)
    assert targets(gm) == ["tag_activation_checkpoint", "getitem"]
    inlined = InlineCalls()(gm).graph_module
    assert targets(inlined) == ["linear", "relu"]
    with torch.no_grad():
        assert torch.equal(inlined(*inputs)[0], gm(*inputs)[0])


def test_a_plain_wrap() -> None:
    body = Graph()
    x, w = body.placeholder("x"), body.placeholder("w")
    body.output(body.call_function(F.linear, (x, w)))
    graph = Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    wrapped = graph.call_function(torch.ops.higher_order.wrap, (graph.get_attr("body"), x, w))
    graph.output(graph.call_method("relu", (wrapped,)))
    gm = GraphModule({"body": GraphModule({}, body)}, graph)
    inlined = InlineCalls()(gm).graph_module
    assert targets(inlined) == ["linear", "relu"]
    w = linear().weight.detach()
    assert torch.equal(inlined(X, w), F.linear(X, w).relu())


def in_bfloat16(self: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = self.fc(x)
    return y.float() + self.fc(x)


def without_gradients(self: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        y = self.fc(x)
    return y + self.fc(x)


@pytest.mark.parametrize(
    ("forward", "call", "expected"),
    [
        (
            in_bfloat16,
            "wrap_with_autocast",
            ["_enter_autocast", "linear.default", "_exit_autocast"],
        ),
        (
            without_gradients,
            "wrap_with_set_grad_enabled",
            ["is_grad_enabled", "_set_grad_enabled", "linear.default", "_set_grad_enabled"],
        ),
    ],
)
def test_calls_that_set_modes(forward: Any, call: str, expected: list[str]) -> None:
    model = Functional(forward, fc=linear())
    gm = trace("export", model, X)
    assert call in targets(gm)
    inlined = InlineCalls()(gm).graph_module
    assert targets(inlined)[: len(expected)] == expected
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled):
            found, plain = inlined(X), gm(X)
            assert torch.is_grad_enabled() == enabled
        assert torch.equal(found, plain)
        assert found.requires_grad == plain.requires_grad
    gm = observed(inlined, Plan(model, STATIC))
    assert {s.name for n in gm.graph.nodes for s in observes(n)} == {"fc.weight", "fc.input"}


def test_calls_that_set_modes_around_nothing_of_interest_stay() -> None:
    def forward(self, x):
        with torch.no_grad():
            y = x.cos()
        return self.fc(x) * y

    gm = trace("export", Functional(forward, fc=linear()), X)
    assert "wrap_with_set_grad_enabled" in targets(gm)
    assert not InlineCalls()(gm).modified


def test_branches_stay() -> None:
    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda y: self.fc(y), lambda y: self.fc(y) * 2, (x,))

    gm = trace("dynamo", Functional(forward, fc=linear()), X)
    result = InlineCalls()(gm)
    assert not result.modified
    assert "cond" in targets(result.graph_module)


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_what_stands_in_calls_is_observed_and_folded(compiler: str) -> None:
    torch._dynamo.reset()
    model = Stack()
    calibration = Calibration(model, STATIC, compiler=compiler)
    calibration.observe(X)
    qparams = calibration.finalize()
    assert len(qparams) == 6
    assert len({float(qparams[f"layers.{index}.fc.input"]["scale"]) for index in range(3)}) == 3
    inputs = Inputs(model, STATIC)
    with torch.no_grad():
        model(X)
    inputs.remove()
    assert_same_qparams(qparams, {n: o.get_qparams() for n, o in inputs.observers.items()})
    compiled = torch.compile(model, backend=calibration.backend)
    with torch.no_grad():
        assert torch.equal(compiled(X), quantized_copy(model, qparams, STATIC)(X))


def test_constants_of_a_body_come_along() -> None:
    body = Graph()
    x = body.placeholder("x")
    body.output((body.call_method("add", (x, body.get_attr("bias"))), 3))
    graph = Graph()
    x = graph.placeholder("x")
    held = graph.get_attr("body")
    call = graph.call_function(torch.ops.higher_order.invoke_subgraph, (held, "body", x))
    parts = [graph.call_function(operator.getitem, (call, index)) for index in range(2)]
    graph.output(tuple(parts))
    bias = torch.ones(4)
    gm = GraphModule({"body": GraphModule({"bias": bias}, body)}, graph)
    inlined = InlineCalls()(gm).graph_module
    found, constant = inlined(X)
    assert torch.equal(found, X + 1)
    assert constant == 3


def test_second_run_changes_nothing_and_the_input_is_left_alone() -> None:
    gm = trace("dynamo", Stack(), X)
    before = ops(gm)
    once = InlineCalls()(gm)
    assert ops(gm) == before
    again = InlineCalls()(once.graph_module)
    assert not again.modified
    assert ops(again.graph_module) == ops(once.graph_module)
