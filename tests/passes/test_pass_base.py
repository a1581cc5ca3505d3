from dataclasses import dataclass

import pytest
import torch
from graphs import STATIC
from torch.fx import GraphModule, symbolic_trace

from inlay.errors import ConfigurationError, GraphError
from inlay.graph import copy, made_by, stamp
from inlay.passes import (
    PREPARE,
    CompareLayers,
    FoldQParams,
    OutlineRepeats,
    Pass,
    PassResult,
    Pipeline,
    PruneUnobserved,
    RemoveObservers,
    UseEqualized,
)
from inlay.recipe import Plan


@dataclass(frozen=True, kw_only=True)
class Double(Pass):
    """Doubles the output, once."""

    def call(self, gm: GraphModule) -> PassResult:
        gm = copy(gm)
        (output,) = gm.graph.find_nodes(op="output")
        value = output.args[0]
        if made_by(value) == self.name:
            return PassResult(gm, False)
        with gm.graph.inserting_before(output):
            doubled = stamp(gm.graph.call_function(torch.mul, (value, 2)), self.name)
        output.args = (doubled,)
        gm.recompile()
        return PassResult(gm, True)

    def ensures(self, gm: GraphModule) -> None:
        (output,) = gm.graph.find_nodes(op="output")
        if made_by(output.args[0]) != self.name:
            raise GraphError("the output is not doubled")


@dataclass(frozen=True, kw_only=True)
class Fail(Pass):
    error: Exception

    def call(self, gm: GraphModule) -> PassResult:
        raise self.error


@dataclass(frozen=True, kw_only=True)
class NeedsDouble(Pass):
    def requires(self, gm: GraphModule) -> None:
        Double().ensures(gm)

    def call(self, gm: GraphModule) -> PassResult:
        return PassResult(gm, False)


def traced() -> GraphModule:
    return symbolic_trace(torch.nn.Linear(2, 2))


def test_a_pass_is_a_function_of_the_graph() -> None:
    gm, x = traced(), torch.ones(1, 2)
    code = gm.code
    result = Double()(gm)
    assert result.modified
    assert gm.code == code
    assert torch.equal(result.graph_module(x), 2 * gm(x))
    assert not Double()(result.graph_module).modified


def test_pipeline_runs_in_order_and_tells_whether_anything_changed() -> None:
    result = Pipeline((Double(), NeedsDouble()))(traced())
    assert result.modified
    assert not Pipeline((Double(), NeedsDouble()))(result.graph_module).modified


def test_unmet_requirement_names_the_pass_and_those_before_it() -> None:
    with pytest.raises(GraphError, match=r"in pass NeedsDouble, after no other: .*not doubled"):
        Pipeline((NeedsDouble(), Double()))(traced())


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ConfigurationError("no such thing"), ConfigurationError),
        (KeyError("node_7"), GraphError),
    ],
)
def test_errors_name_the_pass_and_those_before_it(error, expected) -> None:
    with pytest.raises(expected, match="in pass Fail, after Double: ") as caught:
        Pipeline((Double(), Fail(error=error)))(traced())
    assert caught.value.__cause__ is error


def test_copy_keeps_parameters_and_mode() -> None:
    gm = traced().eval()
    copied = copy(gm)
    assert copied.weight is gm.weight
    assert not copied.training
    assert copied.graph is not gm.graph


@dataclass(frozen=True, kw_only=True)
class Configured(Pass):
    factor: int
    keep: frozenset[str] = frozenset({"x"})

    def call(self, gm: GraphModule) -> PassResult:
        return PassResult(gm, False)


def test_pipelines_fill_fields_and_leave_defaults() -> None:
    ready = Configured(factor=7)
    made, kept, given = Pipeline.of([Configured, ready, Configured], factor=3, unused=1).passes
    assert made == given == Configured(factor=3, keep=frozenset({"x"}))
    assert kept is ready
    with_keep = Pipeline.of([Configured], factor=3, keep=frozenset({"y"})).passes
    assert with_keep == (Configured(factor=3, keep=frozenset({"y"})),)


def test_a_field_that_nothing_fills_is_named() -> None:
    with pytest.raises(ConfigurationError, match="Configured needs factor"):
        Pipeline.of([Configured], keep=frozenset())


@pytest.mark.parametrize(
    "step",
    [*PREPARE[1:], PruneUnobserved, FoldQParams, UseEqualized, RemoveObservers, CompareLayers],
)
def test_a_graph_that_is_outlined_is_refused(step: type[Pass]) -> None:
    """A pass that looked at the outer graph alone would miss, or drop, what is inside."""
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(3)))
    traced = torch.export.export(model, (torch.ones(1, 2),)).module(check_guards=False)
    cut = OutlineRepeats()(traced)
    assert cut.modified
    (ready,) = Pipeline.of([step], plan=Plan(model, STATIC), qparams={}).passes
    with pytest.raises(GraphError, match="before repeats of the graph are outlined"):
        ready(cut.graph_module)
