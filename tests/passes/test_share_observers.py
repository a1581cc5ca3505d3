import torch
from graphs import STATIC, Functional, linear, observed, ops, targets, trace

from inlay import Recipe
from inlay.graph import added_inputs, observes
from inlay.nodes.observe import Observe
from inlay.passes import ShareObservers
from inlay.recipe import Plan

X = torch.randn(2, 4)


def shared(forward, recipe: Recipe = STATIC):
    model = Functional(forward, q=linear(), k=linear(seed=1))
    return observed(trace("dynamo", model, X), Plan(model, recipe))


def groups(gm) -> list[list[str]]:
    return [
        [slot.name for slot in observes(node)]
        for node in gm.graph.nodes
        if isinstance(node.target, Observe)
    ]


def test_docstring_example() -> None:
    gm = shared(lambda self, x: (self.q(x), self.k(x)))
    assert groups(gm) == [["q.input", "k.input"]]
    assert targets(gm) == ["observe_weight", "observe", "linear", "observe_weight", "linear"]
    assert {i.slot for i in added_inputs(gm.graph).values()} == {"q.input"}


def test_other_values_are_not_shared() -> None:
    assert groups(shared(lambda self, x: self.k(self.q(x)))) == [["q.input"], ["k.input"]]


def test_other_rules_are_not_shared() -> None:
    model = Functional(lambda self, x: (self.q(x), self.k(x)), q=linear(), k=linear(seed=1))
    recipe = Recipe.from_config(
        {
            "config_groups": {
                "a": {"targets": ["q"], "input_activations": {"observer": "static_minmax"}},
                "b": {"targets": ["k"], "input_activations": {"observer": "minmax"}},
            }
        }
    )
    gm = observed(trace("dynamo", model, X), Plan(model, recipe))
    assert groups(gm) == [["q.input"], ["k.input"]]


def test_a_value_changed_in_between_is_not_shared() -> None:
    def forward(self, x):
        y = x * 2
        q = self.q(y)
        y.add_(1)
        return q, self.k(y)

    assert groups(shared(forward)) == [["q.input"], ["k.input"]]


def test_second_run_changes_nothing_and_the_input_is_left_alone() -> None:
    gm = shared(lambda self, x: (self.q(x), self.k(x)))
    before = ops(gm)
    again = ShareObservers()(gm)
    assert not again.modified
    assert ops(again.graph_module) == before == ops(gm)
