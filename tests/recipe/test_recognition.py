"""Modules whose products no graph would show are reported before anything is calibrated."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

from inlay import Calibration, Recipe, StatisticsError
from inlay.recipe import Plan
from inlay.recipe.recognition import problem_with_product

STATIC = Recipe.from_preset("W8A8_STATIC", inputs={"observer": "static_minmax"})
X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


def layer(forward: Callable[..., Any], base: Any = nn.Linear) -> Any:
    return type("Own", (base,), {"forward": forward})(4, 4)


def grouped(self: Any, x: torch.Tensor) -> torch.Tensor:
    """As `o_a_proj` of DeepSeek-V4 does."""
    weight = self.weight.view(2, -1, 4).transpose(1, 2)
    return torch.bmm(x.reshape(-1, 2, 4).transpose(0, 1), weight).transpose(0, 1)


UNKNOWN = {
    "view": grouped,
    "mul": lambda self, x: F.linear(x, self.weight * 2, self.bias),
    "einsum": lambda self, x: torch.einsum("...i,oi->...o", x, self.weight),
    "matmul": lambda self, x: x @ self.weight,
}
KNOWN = {
    "super": lambda self, x: nn.Linear.forward(self, x * 2),
    "function": lambda self, x: F.linear(x, self.weight) + self.bias,
    "transposed": lambda self, x: x @ self.weight.T + self.bias,
    "swapped": lambda self, x: torch.addmm(self.bias, x, self.weight.transpose(0, 1)),
    "two values": lambda self, x, y: F.linear(x + y, self.weight),  # it cannot be tried
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_product_with_something_else_than_the_weight(name: str) -> None:
    problem = problem_with_product(layer(UNKNOWN[name]))
    assert problem is not None
    assert f"calls {name} on it" in problem


@pytest.mark.parametrize("name", KNOWN)
def test_a_product_that_is_recognised(name: str) -> None:
    own = layer(KNOWN[name])
    assert problem_with_product(own) is None
    if name == "two values":
        return
    calibration = Calibration(nn.Sequential(own), STATIC, compiler="eager")
    calibration.observe(X)
    assert calibration.finalize().keys() == {"0.input", "0.weight"}


def test_an_embedding_with_a_forward_of_its_own() -> None:
    scaled = layer(lambda self, ids: nn.Embedding.forward(self, ids) * 2, nn.Embedding)
    assert problem_with_product(scaled) is None


def test_trying_a_forward_leaves_the_module_as_it_is() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.kept = x
        self.seen.append(x)
        return F.linear(x, self.weight)

    own = layer(forward)
    own.seen = []
    before, weight = set(vars(own)), own.weight
    assert problem_with_product(own) is None
    assert own.seen == []
    assert set(vars(own)) == before
    assert own.weight is weight


@pytest.mark.parametrize("preset", ["W8A8_STATIC", "W8A8", "W4A16"])
def test_what_is_not_recognised_stays_as_it_is(preset: str) -> None:
    options: dict[str, Any] = {"weights": {"group_size": 4}} if preset == "W4A16" else {}
    model = nn.Sequential(nn.Linear(4, 4), layer(grouped), layer(grouped))
    with pytest.warns(UserWarning, match="1 and 1 more stay in full precision: .*view"):
        calibration = Calibration(model, Recipe.from_preset(preset, **options), compiler="eager")
    assert {slot.module for slot in calibration.plan.slots.values()} == {"0"}
    assert "1 and 1 more stay in full precision" in calibration.explain()


def test_a_computed_weight_stays_as_it_is() -> None:
    model = nn.Sequential(nn.Linear(4, 4), parametrizations.weight_norm(nn.Linear(4, 4)))
    with pytest.warns(UserWarning, match="1 stays in full precision: .*is computed"):
        calibration = Calibration(model, STATIC, compiler="eager")
    calibration.observe(X)
    assert calibration.finalize().keys() == {"0.input", "0.weight"}


def test_a_pattern_that_means_another_kind_of_module() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Bilinear(4, 4, 4), nn.LayerNorm(4))
    recipe = Recipe.from_preset("W8A8", targets=["re:.*"])
    with pytest.warns(UserWarning, match="1 stays in full precision: it is a Bilinear"):
        plan = Plan(model, recipe)
    assert plan.modules_left.keys() == {"1"}


def test_a_module_that_ran_unrecognised_is_named_when_finalized() -> None:
    own = layer(lambda self, x, y: F.linear(x, self.weight * y))
    model = nn.Module()
    model.own, model.fc, model.idle = own, nn.Linear(4, 4), nn.Linear(4, 4)
    model.forward = lambda x: model.own(model.fc(x), 2)  # type: ignore[method-assign]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        calibration = Calibration(model, STATIC, compiler="eager")
    calibration.observe(X)
    with pytest.raises(StatisticsError, match=r"saw no data: own\.input, idle\.input") as error:
        calibration.finalize()
    assert ". own ran, but no product with the whole weight was recognised" in str(error.value)
