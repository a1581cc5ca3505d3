import pytest
import torch
from graphs import STATIC, TRACERS, Functional, linear, ops, trace
from torch import nn

from inlay import Recipe
from inlay.errors import GraphError
from inlay.graph import added_inputs, made_by, observes
from inlay.passes import Annotate, InsertObservers, Pipeline
from inlay.recipe import Plan
from inlay.statistics.rule import Rule

X = torch.randn(2, 4)
W, P = "l_self_modules_", "parameters_weight_"


def inserted(model: nn.Module, recipe: Recipe = STATIC, how: str = "dynamo"):
    gm = trace(how, model, X)
    return Pipeline((Annotate(plan=Plan(model, recipe)), InsertObservers()))(gm).graph_module


def test_docstring_example() -> None:
    gm = inserted(Functional(lambda self, x: self.fc(x), fc=linear()))
    w = "fc.weight"
    assert ops(gm) == [
        f"observe_weight({w})  # fc.weight, by InsertObservers",
        "observe(x, …)  # fc.input, by InsertObservers",
        f"linear = linear(x, {w}, None)",
        "return (linear)",
    ]
    assert list(map(str, added_inputs(gm.graph).values())) == [
        "fc.input seen",
        "fc.input tokens",
        "fc.input max_vals",
        "fc.input min_vals",
    ]


@pytest.mark.parametrize("how", TRACERS)
def test_every_tracer(how: str) -> None:
    model = Functional(lambda self, x: self.b(self.a(x).relu()), a=linear(), b=linear(seed=1))
    gm = inserted(model, STATIC, how)
    slots = [slot.name for node in gm.graph.nodes for slot in observes(node)]
    assert slots == ["a.weight", "a.input", "b.weight", "b.input"]


def test_outputs_are_observed_after_the_op() -> None:
    recipe = Recipe.from_preset("W8A16", weights={"strategy": "channel"}, outputs={"num_bits": 8})
    gm = inserted(Functional(lambda self, x: self.fc(x) + 1, fc=linear()), recipe)
    lines = ops(gm)
    (at,) = [i for i, line in enumerate(lines) if line.startswith("observe(")]
    assert lines[at - 1].startswith("linear = ")
    assert lines[at].startswith("observe(linear, …)  # fc.output")


def test_what_is_observed_is_what_the_op_reads() -> None:
    def forward(self, x):
        y = x * 2
        first = self.a(y)
        y.add_(100)
        return first + self.b(y)

    model = Functional(forward, a=linear(), b=linear(seed=1))
    gm = inserted(model)
    state = {
        what: torch.zeros((), dtype=torch.int64)
        if what.name in ("seen", "tokens")
        else torch.zeros(1)
        for what in added_inputs(gm.graph).values()
    }
    own = {"l_x_": X, f"{W}a_{P}": model.a.weight, f"{W}b_{P}": model.b.weight}
    placeholders = gm.graph.find_nodes(op="placeholder")
    gm(*[own[node.name] for node in placeholders if node.name in own], *state.values())
    found = {str(what): tensor for what, tensor in state.items()}
    assert float(found["a.input max_vals"]) == float((X * 2).max())
    assert float(found["b.input max_vals"]) == float((X * 2 + 100).max())


def test_a_graph_without_shapes_is_refused() -> None:
    model = Functional(lambda self, x: self.fc(x), fc=linear())
    gm = torch.fx.symbolic_trace(model)
    with pytest.raises(
        GraphError, match=r"in pass InsertObservers, after Annotate at node .*shape"
    ):
        Pipeline((Annotate(plan=Plan(model, STATIC)), InsertObservers()))(gm)


def test_slots_of_one_kind_are_traced_once(monkeypatch) -> None:
    traced = []
    specs = Rule.specs
    monkeypatch.setattr(
        Rule, "specs", lambda rule, value: traced.append(rule) or specs(rule, value)
    )
    blocks = nn.Sequential(*(linear() for _ in range(5)), linear(6, 4))
    gm = inserted(blocks)
    assert sum(len(observes(node)) for node in gm.graph.nodes) == 12
    assert len(traced) == 1  # all inputs have the same shape


def test_second_run_changes_nothing_and_the_input_is_left_alone() -> None:
    model = Functional(lambda self, x: self.fc(x), fc=linear())
    gm = Annotate(plan=Plan(model, STATIC))(trace("dynamo", model, X)).graph_module
    before = ops(gm)
    once = InsertObservers()(gm)
    assert once.modified
    assert ops(gm) == before
    assert not InsertObservers()(once.graph_module).modified


def test_nodes_carry_the_name_of_the_pass() -> None:
    gm = inserted(Functional(lambda self, x: self.fc(x), fc=linear()))
    made = [node for node in gm.graph.nodes if made_by(node) == "InsertObservers"]
    assert len(made) == 6  # two observers and four inputs


def test_ensures_notices_a_missing_observer() -> None:
    gm = inserted(Functional(lambda self, x: self.fc(x), fc=linear()))
    (observe,) = [n for n in gm.graph.nodes if [s.name for s in observes(n)] == ["fc.input"]]
    gm.graph.erase_node(observe)
    with pytest.raises(GraphError, match=r"fc\.input at node linear is not observed"):
        InsertObservers().ensures(gm)
