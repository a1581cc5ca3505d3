"""Modules that share a weight: each sees its own inputs, and the weight is quantized once."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from specification import Inputs
from torch import nn

from inlay import Calibration, ConfigurationError, Recipe
from inlay.checking import check_calibration
from inlay.observers import QParamsDict
from inlay.recipe import make_observer

X = [torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
STATIC: dict[str, Any] = {"inputs": {"observer": "static_minmax"}}
SEARCHED: dict[str, Any] = {"weights": {"observer": "imatrix_mse", "group_size": 4}}


def static(**options: Any) -> Recipe:
    return Recipe.from_preset("W8A8_STATIC", **STATIC, **options)


def linear() -> nn.Linear:
    return nn.Linear(4, 4, bias=False)


class Pair(nn.Module):
    """Two modules with one weight."""

    def __init__(self, *, function: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.c, self.function = linear(), linear(), function
        self.c.weight = self.a.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        last = F.linear(x, self.c.weight) if self.function else x
        return self.a(x) + self.c(x.sin() * 5) + last


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.out, self.norm = linear(), linear(), nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x * 2 + self.out(self.fc(x).relu()))


class Row(nn.Module):
    """Three blocks; the last two share some parameters."""

    def __init__(self, *shared: str, last: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        for name in shared:
            own = self.blocks[1].get_submodule(name)
            for key, parameter in own.named_parameters():
                setattr(self.blocks[2].get_submodule(name), key, parameter)
        self.last = linear() if last else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def finalized(model: nn.Module, recipe: Recipe) -> dict[str, QParamsDict]:
    calibration = Calibration(model, recipe, compiler="eager")
    for x in X:
        calibration.observe(x)
    return calibration.finalize()


@pytest.mark.parametrize("ignored", [[], ["a"], ["c"]])
def test_each_module_sees_its_own_inputs(ignored: list[str]) -> None:
    model = Pair()
    found = finalized(model, static(ignore=ignored))
    sizes = {"a": max(float(x.abs().max()) for x in X), "c": 5.0}
    assert found.keys() == {f"{n}.{part}" for n in {*sizes} - {*ignored} for part in
                            ("input", "weight")}  # fmt: skip
    for name in {*sizes} - {*ignored}:
        assert float(found[f"{name}.input"]["scale"]) * 127.5 <= sizes[name] * 1.01
    if not ignored:
        assert torch.equal(found["a.weight"]["scale"], found["c.weight"]["scale"])
        assert not torch.equal(found["a.input"]["scale"], found["c.input"]["scale"])
    check_calibration(model, static(ignore=ignored), [(x,) for x in X])


ROWS = [("fc",), ("fc", "out"), ("fc", "out", "norm")]


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("ignored", [[], ["blocks.1.fc"], ["blocks.2.fc", "last"]])
@pytest.mark.parametrize("shared", ROWS)
def test_blocks_that_share_weights(shared: tuple[str, ...], ignored: list[str], last: bool) -> None:
    """One graph serves all blocks, and the last of these know nothing of their own but calls."""
    ignored = ignored if last else ignored[:1]
    model, recipe = Row(*shared, last=last), static(ignore=ignored)
    found = finalized(model, recipe)
    inputs = Inputs(model, recipe)
    for x in X:
        model(x)
    inputs.remove()
    assert len(inputs.observers) == 6 + last - len(ignored)
    for name, observer in inputs.observers.items():
        assert torch.equal(found[name]["scale"], observer.get_qparams()["scale"])


def test_a_repeated_module_has_one_name() -> None:
    model = Row()
    model.blocks[2] = model.blocks[1]
    calibration = Calibration(model, static(), compiler="eager")
    calibration.observe(X[0])
    seen = {
        slot.name: calibration.statistics.seen(slot) for slot in calibration.plan.activation_slots()
    }
    assert seen["blocks.0.fc.input"] == 1
    assert seen["blocks.1.fc.input"] == 2
    assert "blocks.2.fc.input" not in seen


def test_a_function_of_a_shared_weight_is_a_use_of_a_quantized_module() -> None:
    found = finalized(Pair(function=True), static(ignore=["a"]))
    assert found.keys() == {"c.input", "c.weight"}


def test_a_shared_weight_is_searched_with_the_inputs_of_all() -> None:
    model, recipe = Pair(), Recipe.from_preset("W4A16", **SEARCHED)
    found = finalized(model, recipe)
    observer = make_observer("weight", Calibration(model, recipe).plan.slots["a.weight"].args)
    for x in X:
        observer.observe_input(x)
        observer.observe_input(x.sin() * 5)
    observer(model.a.weight.detach())
    for name in ("a", "c"):
        assert torch.equal(found[f"{name}.weight"]["scale"], observer.get_qparams()["scale"])


def test_two_schemes_for_one_weight_are_refused() -> None:
    weights = {"num_bits": 8, "strategy": "channel"}
    groups = {
        "one": {"targets": ["re:a"], "weights": weights},
        "other": {"targets": ["re:c"], "weights": {**weights, "num_bits": 4}},
    }
    recipe = Recipe.from_config({"config_groups": groups})
    with pytest.raises(ConfigurationError, match="a and c share one weight"):
        Calibration(Pair(), recipe)


def test_what_shares_a_weight_is_not_equalized() -> None:
    model = Row("fc", "out")
    calibration = Calibration(model, static(equalize=0.5), compiler="eager")
    for x in X:
        calibration.observe(x)
    calibration.finalize()
    assert (
        "blocks.1.out, blocks.2.out share one weight"
        in calibration.equalization.refused["blocks.1.out"]
    )
    assert "blocks.1.fc.weight" not in calibration.equalization.parameters.changed
    check_calibration(model, static(equalize=0.5), [(x,) for x in X])
