import pytest
import torch
from graphs import STATIC, TRACERS, linear, observed, trace
from torch import nn

from inlay.passes import LeaveOutPadding
from inlay.slots import Plan
from inlay.state import Observe


class Masked(nn.Module):
    def __init__(self, values: int = 3) -> None:
        super().__init__()
        self.fc = linear()
        self.values = values

    def forward(self, x: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        x = x * attention_mask[..., None]
        if self.values == 2:
            return self.fc(x.reshape(-1, 4))
        return self.fc(x[:, 0]) if self.values == 1 else self.fc(x)


def masks(gm) -> list[str]:
    return [
        str(node.kwargs.get("mask", "none"))
        for node in gm.graph.nodes
        if isinstance(node.target, Observe)
    ]


def masked(how: str, values: int = 3, mask: torch.Tensor | None = None):
    model = Masked(values)
    mask = torch.ones(2, 5, dtype=torch.int64) if mask is None else mask
    gm = trace(how, model, torch.randn(2, 5, 4), mask)
    return observed(gm, Plan(model, STATIC), LeaveOutPadding())


@pytest.mark.parametrize("how", TRACERS)
def test_docstring_example(how: str) -> None:
    gm = masked(how)
    (name,) = masks(gm)
    assert "attention_mask" in name
    assert not LeaveOutPadding()(gm).modified


@pytest.mark.parametrize(("values", "found"), [(3, True), (2, True), (1, False)])
def test_values_are_matched_by_their_shape(values: int, found: bool) -> None:
    (name,) = masks(masked("dynamo", values))
    assert (name != "none") == found


def test_a_mask_of_another_shape_says_nothing_of_tokens() -> None:
    (name,) = masks(masked("dynamo", mask=torch.ones(5)))
    assert name == "none"
