import pytest
import torch
import torch.nn.functional as F
from graphs import STATIC, TRACERS, Functional, linear, observed, trace
from torch import nn

from inlay import GraphError, Recipe
from inlay.graph import slots_of
from inlay.passes import Annotate, InsertObservers, RemoveObservers
from inlay.recipe import Plan

X = torch.randn(2, 4)


def annotations(model: nn.Module, recipe: Recipe = STATIC, how: str = "dynamo", *args) -> list:
    gm = Annotate(plan=Plan(model, recipe))(trace(how, model, *(args or (X,)))).graph_module
    return [sorted(s.name for s in slots_of(n).values()) for n in gm.graph.nodes if slots_of(n)]


@pytest.mark.parametrize("how", TRACERS)
def test_docstring_example(how: str) -> None:
    model = Functional(lambda self, x: self.fc(x), fc=linear())
    assert annotations(model, STATIC, how) == [["fc.input", "fc.weight"]]


def test_module_called_twice_is_one_module() -> None:
    model = Functional(lambda self, x: self.fc(self.fc(x)), fc=linear())
    assert annotations(model) == [["fc.input", "fc.weight"]] * 2


@pytest.mark.parametrize("how", TRACERS)
def test_modules_that_share_a_weight_are_known_by_their_calls(how: str) -> None:
    model = Functional(lambda self, x: self.b(self.a(x)), a=linear(), b=linear())
    model.b.weight = model.a.weight
    assert annotations(model, STATIC, how) == [["a.input", "a.weight"], ["b.input", "b.weight"]]
    for ignored, left in ("ab", "ba"):
        recipe = Recipe.from_preset("W8A8_STATIC", ignore=[ignored])
        assert annotations(model, recipe, how) == [[f"{left}.input", f"{left}.weight"]]


def test_a_shared_weight_that_a_function_uses() -> None:
    """No module is called, so a quantized one stands for all."""
    model = Functional(lambda self, x: F.linear(x, self.b.weight), a=linear(), b=linear())
    model.b.weight = model.a.weight
    assert annotations(model) == [["a.input", "a.weight"]]
    recipe = Recipe.from_preset("W8A8_STATIC", ignore=["a"])
    assert annotations(model, recipe) == [["b.input", "b.weight"]]


def test_a_module_with_two_names_is_one_module() -> None:
    model = Functional(lambda self, x: self.b(self.a(x)), a=linear(), b=linear())
    model.b = model.a
    assert annotations(model) == [["a.input", "a.weight"]] * 2


def test_embedding_tied_to_a_head() -> None:
    model = Functional(
        lambda self, x: self.head(self.embed(x)), embed=nn.Embedding(4, 4), head=linear()
    )
    model.head.weight = model.embed.weight
    ids = torch.tensor([[1, 2]])
    assert annotations(model, STATIC, "dynamo", ids) == [["head.input", "head.weight"]]
    both = Recipe.from_preset("W8A8_STATIC", targets=["Linear", "Embedding"])
    expected = [["embed.weight"], ["head.input", "head.weight"]]
    for how in TRACERS:
        assert annotations(model, both, how, ids) == expected


def test_other_tensors_are_left_alone() -> None:
    def forward(self, x):
        return F.linear(self.fc(x), x), F.linear(x, self.fc.weight * 2)

    assert annotations(Functional(forward, fc=linear())) == [["fc.input", "fc.weight"]]


def test_ignored_modules_are_left_alone() -> None:
    model = Functional(lambda self, x: self.b(self.a(x)), a=linear(), b=linear(seed=1))
    recipe = Recipe.from_preset("W8A8_STATIC", ignore=["a"])
    assert annotations(model, recipe) == [["b.input", "b.weight"]]


def test_importance_is_watched_where_an_observer_wants_it() -> None:
    model = Functional(lambda self, x: self.fc(x), fc=linear())
    recipe = Recipe.from_preset("W8A16", weights={"observer": "imatrix_mse", "group_size": 4})
    assert annotations(model, recipe) == [["fc.input:importance", "fc.weight"]]


def test_second_run_changes_nothing_and_the_input_is_left_alone() -> None:
    model = Functional(lambda self, x: self.fc(x), fc=linear())
    gm, annotate = trace("dynamo", model, X), Annotate(plan=Plan(model, STATIC))
    once = annotate(gm)
    assert once.modified
    assert not any(slots_of(node) for node in gm.graph.nodes)
    assert not annotate(once.graph_module).modified


def test_another_recipe_takes_the_place_of_the_first() -> None:
    model = Functional(lambda self, x: self.fc(x), fc=linear())
    first = Annotate(plan=Plan(model, STATIC))(trace("dynamo", model, X)).graph_module
    other = Annotate(plan=Plan(model, Recipe.from_preset("FP8")))
    result = other(first)
    assert result.modified
    (slots,) = (slots_of(n) for n in result.graph_module.graph.nodes if slots_of(n))
    assert {slot.args.type for slot in slots.values()} == {"float"}
    assert not other(result.graph_module).modified


def test_observers_of_another_recipe_must_be_removed_first() -> None:
    model = Functional(lambda self, x: self.fc(x), fc=linear())
    gm = observed(trace("dynamo", model, X), Plan(model, STATIC))
    other = Annotate(plan=Plan(model, Recipe.from_preset("FP8")))(gm).graph_module
    with pytest.raises(GraphError, match=r"fc\.(weight|input) is observed.*RemoveObservers"):
        InsertObservers()(other)
    removed = RemoveObservers()(other).graph_module
    assert InsertObservers()(removed).modified
