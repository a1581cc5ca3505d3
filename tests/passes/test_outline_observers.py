"""Observers cut out of the graph, to be compiled while the rest runs op by op."""

import pytest
import torch
from graphs import STATIC, TRACERS, Functional, linear, observed, ops, trace

from inlay.passes import OutlineObservers
from inlay.recipe import Plan

X = torch.randn(3, 4)
MINMAX = OutlineObservers(observers=frozenset({"static_minmax"}))


def two_layers() -> Functional:
    return Functional(lambda self, x: self.o(self.q(x)), q=linear(), o=linear(seed=1))


def test_docstring_example() -> None:
    model = two_layers()
    gm = observed(trace("dynamo", model, X), Plan(model, STATIC))
    outlined = MINMAX(gm)
    assert outlined.modified
    calls = [line for line in ops(outlined.graph_module) if "outlined" in line]
    assert [line.partition("(")[0] for line in calls] == [
        "outlined_0 = outlined_0",
        "outlined_1 = outlined_0",
    ]
    assert len([line for line in ops(outlined.graph_module) if "= linear(" in line]) == 2


@pytest.mark.parametrize("how", TRACERS)
def test_again_and_for_others_it_changes_nothing(how: str) -> None:
    model = two_layers()
    gm = observed(trace(how, model, X), Plan(model, STATIC))
    assert not MINMAX(MINMAX(gm).graph_module).modified
    assert not OutlineObservers(observers=frozenset({"mse"}))(gm).modified


def test_values_of_another_shape_have_a_body_of_their_own() -> None:
    model = Functional(lambda self, x: self.o(self.q(x)), q=linear(8, 4), o=linear(4, 8, seed=1))
    gm = observed(trace("dynamo", model, X), Plan(model, STATIC))
    calls = MINMAX(gm).graph_module.graph.find_nodes(op="call_module")
    assert {str(node.target) for node in calls} == {"outlined_0", "outlined_1"}
