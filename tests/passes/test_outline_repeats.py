import pytest
import torch
from families import FAMILIES, batch
from graphs import Functional, dynamo_graph, linear, ops, trace
from torch import nn

from inlay.passes import OutlineRepeats

X = torch.randn(2, 4)


class Stack(nn.Module):
    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(linear(seed=index), nn.ReLU()) for index in range(depth)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_docstring_example() -> None:
    gm, inputs = dynamo_graph(Stack(), X)
    outlined = OutlineRepeats()(gm)
    assert outlined.modified
    assert ops(outlined.graph_module) == [
        "outlined_0 = outlined_0(x, layers.0.0.weight)  # by OutlineRepeats",
        "_getitem = _getitem(outlined_0, 0)  # by OutlineRepeats",
        "outlined_1 = outlined_0(_getitem, layers.1.0.weight)  # by OutlineRepeats",
        "_getitem_1 = _getitem(outlined_1, 0)  # by OutlineRepeats",
        "return (_getitem_1)",
    ]
    with torch.no_grad():
        assert torch.equal(outlined.graph_module(*inputs)[0], gm(*inputs)[0])


@pytest.mark.parametrize("how", ["dynamo", "export"])
def test_depth_does_not_matter(how: str) -> None:
    outlined = OutlineRepeats()(trace(how, Stack(9), X)).graph_module
    assert len({str(n.target) for n in outlined.graph.find_nodes(op="call_module")}) == 1


def test_blocks_that_differ_have_bodies_of_their_own() -> None:
    model = Stack(3)
    model.layers[1][1] = nn.GELU()
    outlined = OutlineRepeats()(trace("dynamo", model, X)).graph_module
    called = [str(n.target) for n in outlined.graph.find_nodes(op="call_module")]
    assert called == ["outlined_0", "outlined_1", "outlined_0"]


def test_a_graph_that_switches_modes_is_left_whole() -> None:
    class Mixed(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return super().forward(x)

    assert not OutlineRepeats()(trace("dynamo", Mixed(), X)).modified


def test_a_graph_without_blocks_is_left_whole() -> None:
    model = Functional(lambda self, x: self.fc(x), fc=linear())
    assert not OutlineRepeats()(trace("dynamo", model, X)).modified


def test_second_run_changes_nothing_and_the_input_is_left_alone() -> None:
    gm = trace("dynamo", Stack(), X)
    before = ops(gm)
    once = OutlineRepeats()(gm)
    assert ops(gm) == before
    again = OutlineRepeats()(once.graph_module)
    assert not again.modified
    assert ops(again.graph_module) == ops(once.graph_module)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_three_bodies(family: str) -> None:
    model = FAMILIES[family]()
    gm, inputs = dynamo_graph(model, **batch(model))
    outlined = OutlineRepeats()(gm).graph_module
    assert len({str(n.target) for n in outlined.graph.find_nodes(op="call_module")}) == 3
    with torch.no_grad():
        for own, expected in zip(outlined(*inputs), gm(*inputs), strict=True):
            assert torch.equal(own, expected)
