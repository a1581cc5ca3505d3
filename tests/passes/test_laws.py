"""Laws of passes over generated graphs, friendly and unfriendly ones."""

from typing import Any

import pytest
import torch
from graphs import STATIC, observed, ops, trace
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples
from specification import assert_eager_statistics, quantized_copy
from torch import nn
from torch.utils.checkpoint import checkpoint

from inlay import Calibration
from inlay.passes import PREPARE, InsertObservers, Pipeline, RemoveObservers, ShareObservers
from inlay.recipe import Plan

pytestmark = pytest.mark.slow

WIDTH = 4


def linear(self: Any, x: torch.Tensor, y: torch.Tensor, number: int) -> torch.Tensor:
    return self.layers[number](x)


def product(self: Any, x: torch.Tensor, y: torch.Tensor, number: int) -> torch.Tensor:
    return self.products[number % 2](x)


def tied(self: Any, x: torch.Tensor, y: torch.Tensor, number: int) -> torch.Tensor:
    return self.tied(x) + self.layers[0](x * number)


def relu(self: Any, x: torch.Tensor, y: torch.Tensor, number: int) -> torch.Tensor:
    return x.relu()


def residual(self: Any, x: torch.Tensor, y: torch.Tensor, number: int) -> torch.Tensor:
    return x + self.layers[number](x)


def view(self: Any, x: torch.Tensor, y: torch.Tensor, number: int) -> torch.Tensor:
    return x.reshape(-1, WIDTH).reshape(y.shape)


def add_input(self: Any, x: torch.Tensor, y: torch.Tensor, number: int) -> torch.Tensor:
    return x + y * number


def concat(self: Any, x: torch.Tensor, y: torch.Tensor, number: int) -> torch.Tensor:
    return torch.cat([x, y], dim=0)[: y.shape[0]]


def split(self: Any, x: torch.Tensor, y: torch.Tensor, number: int) -> torch.Tensor:
    parts = x.split(WIDTH // 2, dim=-1)
    return torch.cat([parts[1], parts[0]], dim=-1)


def written(self: Any, x: torch.Tensor, y: torch.Tensor, number: int) -> torch.Tensor:
    """A value that is observed, changed in place, and observed again."""
    x = x.clone()
    before = self.layers[number](x)
    x.add_(number + 1)
    return before + self.layers[0](x)


def written_through_a_view(
    self: Any, x: torch.Tensor, y: torch.Tensor, number: int
) -> torch.Tensor:
    x = x.clone()
    before = self.layers[number](x)
    x.view(-1).mul_(number + 2)
    return before + self.layers[1](x)


def unused(self: Any, x: torch.Tensor, y: torch.Tensor, number: int) -> torch.Tensor:
    self.layers[number](x * 3).relu()
    return x


def item_set(self: Any, x: torch.Tensor, y: torch.Tensor, number: int) -> torch.Tensor:
    x = x.clone()
    before = self.layers[number](x)
    x[:, 0] = number
    return before + self.layers[2](x)


def branch(self: Any, x: torch.Tensor, y: torch.Tensor, number: int) -> torch.Tensor:
    return torch.cond(x.sum() > number, lambda z: z * 2, lambda z: z - 1, (x,))


def recomputed(self: Any, x: torch.Tensor, y: torch.Tensor, number: int) -> torch.Tensor:
    return checkpoint(self.layers[number], x, use_reentrant=False)


def batched(self: Any, x: torch.Tensor, y: torch.Tensor, number: int) -> torch.Tensor:
    return torch.vmap(lambda row: row * number + 1)(x)


# What every tracer can trace, and what symbolic_trace cannot.
PLAIN = [
    linear, product, tied, relu, residual, view, add_input, concat, split, written,
    written_through_a_view, unused,
]  # fmt: skip
STEPS = [*PLAIN, item_set, branch, recomputed, batched]


class Product(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.T + self.bias


class Generated(nn.Module):
    """A model put together from a list of steps, each a function and a number."""

    def __init__(self, steps: list[tuple[Any, int]]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.products = nn.ModuleList(Product(WIDTH, WIDTH) for _ in range(2))
        self.tied = nn.Linear(WIDTH, WIDTH)
        self.tied.weight = self.layers[1].weight
        self.requires_grad_(False)
        self.steps = steps

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for step, number in self.steps:
            x = step(self, x, y, number)
        return x

    def __repr__(self) -> str:
        return " → ".join(f"{step.__name__} {number}" for step, number in self.steps)


def generated(steps: list[Any]) -> st.SearchStrategy[Generated]:
    step = st.tuples(st.sampled_from(steps), st.integers(0, 2))
    return st.lists(step, min_size=1, max_size=6).map(Generated)


models = generated(STEPS)
traced = st.one_of(
    st.tuples(generated(STEPS), st.just("export")),
    st.tuples(generated(PLAIN), st.just("symbolic_trace")),
)
laws = examples(15)


def inputs(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(2, 3, WIDTH, generator=generator) for _ in range(2))


@laws
@given(models)
def test_observers_never_change_outputs_and_count_what_eager_ones_count(model: nn.Module) -> None:
    torch._dynamo.reset()
    calibration = Calibration(model, STATIC, compiler="aot_eager")
    compiled = torch.compile(model, backend=calibration.backend)
    batches = [inputs(seed) for seed in range(2)]
    with torch.no_grad():
        for one in batches:
            assert torch.equal(compiled(*one), model(*one))
    assert_eager_statistics(calibration, model, batches)


@laws
@given(traced)
def test_running_a_pass_twice_changes_nothing(case: tuple[nn.Module, str]) -> None:
    model, how = case
    gm: Any = trace(how, model, *inputs())
    for step in Pipeline.of(PREPARE, plan=Plan(model, STATIC)).passes:
        gm = step(gm).graph_module
        again = step(gm)
        assert not again.modified
        assert ops(again.graph_module) == ops(gm)


@laws
@given(traced)
def test_insert_and_remove_give_back_the_graph(case: tuple[nn.Module, str]) -> None:
    model, how = case
    gm = trace(how, model, *inputs())
    removed = RemoveObservers()(observed(gm, Plan(model, STATIC))).graph_module
    assert removed.code == gm.code


@laws
@given(models)
def test_a_finalized_model_is_the_quantized_one(model: nn.Module) -> None:
    torch._dynamo.reset()
    calibration = Calibration(model, STATIC, compiler="eager")
    with torch.no_grad():
        calibration.observe(*inputs())
        qparams = calibration.finalize(accept=["unobserved"])
        found = torch.compile(model, backend=calibration.backend)(*inputs())
        assert torch.equal(found, quantized_copy(model, qparams, STATIC)(*inputs()))


@laws
@given(models)
def test_sharing_loses_no_slot(model: nn.Module) -> None:
    gm = trace("export", model, *inputs())
    from inlay.graph import observes
    from inlay.passes import Annotate

    inserted = Pipeline((Annotate(plan=Plan(model, STATIC)), InsertObservers()))(gm).graph_module
    shared = ShareObservers()(inserted).graph_module

    def slots(graph_module) -> set[str]:
        return {s.name for node in graph_module.graph.nodes for s in observes(node)}

    assert slots(shared) == slots(inserted)
