import pytest
import torch
from graphs import STATIC, TRACERS, linear, observed, trace
from torch import nn

import inlay
from inlay.nodes.observe import Observe
from inlay.passes import LeaveOutPadding
from inlay.recipe import Plan


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


def test_sizes_that_vary_each_by_themselves_are_matched_too() -> None:
    class Apart(nn.Module):
        """Reads the mask where nothing says that it is as long as the value."""

        def __init__(self) -> None:
            super().__init__()
            self.fc = linear()

        def forward(self, x: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            return self.fc(x) * attention_mask.sum()

    model = Apart()
    recipe = inlay.Recipe.from_preset("W8A8_STATIC", inputs={"observer": "static_minmax"})
    calibration = inlay.Calibration(model, recipe, compiler="eager")
    for length in (5, 7):
        x, mask = torch.rand(3, length, 4), torch.ones(3, length)
        x[0, -1], mask[0, -1] = 100, 0
        for tensor in (x, mask):
            torch._dynamo.maybe_mark_dynamic(tensor, 1)
        calibration.observe(x, mask)
    assert len(calibration.graphs) == 1
    assert float(calibration.stored().slots["fc.input"].tensors["max_vals"]) <= 1
    # A mask of another length is not taken for one of the value.
    calibration.observe(torch.full((3, 5, 4), 3.0), torch.zeros(3, 6))
    assert len(calibration.graphs) == 2
    assert float(calibration.stored().slots["fc.input"].tensors["max_vals"]) == 3
