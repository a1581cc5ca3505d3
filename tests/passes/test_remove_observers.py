import pytest
import torch
from graphs import STATIC, TRACERS, Functional, linear, observed, ops, trace

from inlay.errors import GraphError
from inlay.graph import added_inputs
from inlay.passes import RemoveObservers
from inlay.recipe import Plan

X = torch.randn(2, 4)


@pytest.mark.parametrize("how", TRACERS)
def test_docstring_example_is_insert_undone(how: str) -> None:
    model = Functional(lambda self, x: self.b(self.a(x)) + self.a(x), a=linear(), b=linear(seed=1))
    gm = trace(how, model, X)
    with_observers = observed(gm, Plan(model, STATIC))
    result = RemoveObservers()(with_observers)
    assert result.modified
    assert ops(result.graph_module) == ops(gm)
    assert result.graph_module.code == gm.code
    assert not added_inputs(result.graph_module.graph)


def test_second_run_changes_nothing_and_the_input_is_left_alone() -> None:
    model = Functional(lambda self, x: self.fc(x), fc=linear())
    gm = observed(trace("dynamo", model, X), Plan(model, STATIC))
    before = ops(gm)
    once = RemoveObservers()(gm)
    assert ops(gm) == before
    assert not RemoveObservers()(once.graph_module).modified


def test_ensures_notices_an_observer() -> None:
    model = Functional(lambda self, x: self.fc(x), fc=linear())
    gm = observed(trace("dynamo", model, X), Plan(model, STATIC))
    with pytest.raises(GraphError, match="observers are left: observe"):
        RemoveObservers().ensures(gm)
