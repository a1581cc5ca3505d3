"""Laws of passes over generated graphs: residuals, shared weights, views, several inputs."""

from typing import Any

import pytest
import torch
from graphs import STATIC, observed, ops, trace
from hypothesis import given, settings
from hypothesis import strategies as st
from specification import assert_eager_statistics
from torch import nn

from inlay import Calibration
from inlay.passes import PREPARE, InsertObservers, Pipeline, RemoveObservers, ShareObservers
from inlay.recipe import Plan

pytestmark = pytest.mark.slow

WIDTH = 4
STEPS = ["linear", "relu", "residual", "view", "add_input", "scale", "concat", "in_place"]


class Generated(nn.Module):
    """A model put together from a list of steps, each a name and a number."""

    def __init__(self, steps: list[tuple[str, int]]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.steps = steps

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        kept = x
        for name, number in self.steps:
            if name == "linear":
                kept, x = x, self.layers[number % 3](x)
            elif name == "relu":
                x = x.relu()
            elif name == "residual":
                x = x + kept
            elif name == "view":
                x = x.reshape(-1, WIDTH).reshape(kept.shape)
            elif name == "add_input":
                x = x + y * number
            elif name == "scale":
                x = x * (number + 0.5)
            elif name == "concat":
                x = torch.cat([x, kept], dim=0)[: x.shape[0]]
            else:
                x = x.clone().add_(number)
        return x


steps = st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 4)), min_size=1, max_size=8)
models = steps.map(Generated)
laws = settings(max_examples=15)


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
@given(models, st.sampled_from(["export", "symbolic_trace"]))
def test_running_a_pass_twice_changes_nothing(model: nn.Module, how: str) -> None:
    gm: Any = trace(how, model, *inputs())
    for step in Pipeline.of(PREPARE, plan=Plan(model, STATIC)).passes:
        gm = step(gm).graph_module
        again = step(gm)
        assert not again.modified
        assert ops(again.graph_module) == ops(gm)


@laws
@given(models, st.sampled_from(["export", "symbolic_trace"]))
def test_insert_and_remove_give_back_the_graph(model: nn.Module, how: str) -> None:
    gm = trace(how, model, *inputs())
    removed = RemoveObservers()(observed(gm, Plan(model, STATIC))).graph_module
    assert removed.code == gm.code


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
