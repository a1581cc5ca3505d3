import torch
from graphs import STATIC, Functional, linear, observed, ops, targets, trace

from inlay import Recipe
from inlay.passes import PruneUnobserved
from inlay.recipe import Plan

X = torch.randn(2, 4)


def pruned(forward, recipe: Recipe = STATIC):
    model = Functional(forward, a=linear(), b=linear(seed=1))
    return observed(trace("dynamo", model, X), Plan(model, recipe), PruneUnobserved())


def test_docstring_example() -> None:
    model = Functional(lambda self, x: self.fc(x), fc=linear())
    gm = observed(trace("dynamo", model, X), Plan(model, STATIC), PruneUnobserved())
    assert ops(gm) == ["observe(x, …)  # fc.input, by InsertObservers", "return ()"]


def test_what_an_observation_needs_stays() -> None:
    gm = pruned(lambda self, x: self.b(self.a(x).relu()).sigmoid() * 3)
    assert targets(gm) == ["observe", "linear", "relu", "observe"]


def test_writes_stay() -> None:
    def forward(self, x):
        y = self.b(self.a(x))
        x.add_(y.mean())
        return y.exp()

    kept = targets(pruned(forward))
    assert "add_" in kept
    assert "exp" not in kept


def test_nothing_observed_leaves_nothing() -> None:
    gm = pruned(lambda self, x: self.b(self.a(x)), Recipe.from_preset("W8A8"))
    assert targets(gm) == []


def test_second_run_changes_nothing_and_the_input_is_left_alone() -> None:
    model = Functional(lambda self, x: self.fc(x), fc=linear())
    gm = observed(trace("dynamo", model, X), Plan(model, STATIC))
    before = ops(gm)
    once = PruneUnobserved()(gm)
    assert once.modified
    assert ops(gm) == before
    assert not PruneUnobserved()(once.graph_module).modified
