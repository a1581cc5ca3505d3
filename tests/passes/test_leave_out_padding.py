import pytest
import torch
from graphs import STATIC, TRACERS, linear, observed, trace
from torch import nn

from inlay.errors import StatisticsError
from inlay.graph import MAIN, PaddingMask, added_inputs
from inlay.nodes.observe import Observe
from inlay.padding.layouts import Layout, Layouts
from inlay.passes import LeaveOutPadding
from inlay.recipe import Plan


class OneLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x)


def leaving_out(layout: Layout, *, masked: tuple[str, ...] = (MAIN,)) -> LeaveOutPadding:
    return LeaveOutPadding(layouts=Layouts({"fc.input": layout}, frozenset(masked)))


def masked(how: str, step: LeaveOutPadding, x: torch.Tensor):
    model = OneLayer()
    return observed(trace(how, model, x), Plan(model, STATIC), step)


def mask_of(gm) -> torch.Tensor | None:
    (node,) = (node for node in gm.graph.nodes if isinstance(node.target, Observe))
    mask = node.kwargs.get("mask")
    return None if mask is None else mask.meta["example_value"]


TOKENS = PaddingMask(MAIN, ("batch", "tokens"))


@pytest.mark.parametrize("how", TRACERS)
def test_docstring_example(how: str) -> None:
    step = leaving_out(TOKENS)
    gm = masked(how, step, torch.randn(2, 5, 4))
    assert mask_of(gm).shape == (2, 5)
    assert TOKENS in added_inputs(gm.graph).values()
    assert not step(gm).modified


def test_batches_without_padding_need_no_mask() -> None:
    assert mask_of(masked("dynamo", LeaveOutPadding(), torch.randn(2, 5, 4))) is None


@pytest.mark.parametrize(
    ("layout", "shape", "expected"),
    [
        (PaddingMask(MAIN, ("tokens", "batch")), (5, 2, 4), (5, 2)),
        (PaddingMask(MAIN, ("batch", "", "tokens")), (2, 3, 5, 4), (2, 1, 5)),
        (PaddingMask(MAIN, ("rows",)), (10, 4), (10,)),
        (PaddingMask(MAIN, ("columns", "")), (10, 3, 4), (10, 1)),
    ],
)
def test_a_mask_has_the_layout_of_its_value(layout, shape, expected) -> None:
    assert mask_of(masked("dynamo", leaving_out(layout), torch.randn(shape))).shape == expected
    valid = torch.rand(2, 5) > 0.5
    arranged = layout.of(valid)
    assert arranged.shape == expected
    tokens = valid if "rows" in layout.axes or layout.axes[0] == "batch" else valid.t()
    assert torch.equal(arranged.flatten(), tokens.flatten())


def test_values_without_tokens_and_sequences_without_a_mask_count_as_a_whole() -> None:
    x = torch.randn(2, 5, 4)
    assert mask_of(masked("dynamo", leaving_out(None), x)) is None
    decoder = leaving_out(PaddingMask("decoder", ("batch", "tokens")))
    assert mask_of(masked("dynamo", decoder, x)) is None


def test_a_slot_whose_layout_is_unknown_is_refused_by_name() -> None:
    x = torch.randn(2, 5, 4)
    with pytest.raises(StatisticsError, match=r"out of fc\.input: it is strange\. Use"):
        masked("dynamo", leaving_out("it is strange"), x)
    with pytest.raises(StatisticsError, match="no call of its module was seen"):
        masked("dynamo", LeaveOutPadding(layouts=Layouts({}, frozenset({MAIN}))), x)
