"""`backend="inlay"`, found through its entry point."""

import gc
import re
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from families import batch
from plain_llama import plain_llama
from specification import assert_equal_qparams, assert_same_qparams, expected_qparams
from torch import nn

import inlay

pytestmark = pytest.mark.slow

RECIPE = "preset: FP8\nignore: [lm_head]\n"


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    file = tmp_path / "recipe.yaml"
    file.write_text(RECIPE)
    return str(file)


def test_without_importing_inlay(recipe: str) -> None:
    code = f"""
import sys, torch
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 4))
options = {{"recipe": {recipe!r}, "compiler": "aot_eager"}}
assert "inlay" in torch.compiler.list_backends()
assert "inlay" not in sys.modules
compiled = torch.compile(model, backend="inlay", options=options)
x = torch.randn(2, 4)
with torch.no_grad():
    assert torch.equal(compiled(x), model(x))
import inlay
qparams = inlay.finalize(compiled)
assert "0.input" in qparams and "2.weight" in qparams
with torch.no_grad():
    assert not torch.equal(compiled(x), model(x))
"""
    Path(recipe).write_text("preset: FP8\nignore: []\n")
    subprocess.run([sys.executable, "-c", code], check=True)


def test_same_as_a_calibration(recipe: str) -> None:
    model = plain_llama()
    compiled = torch.compile(
        model, backend="inlay", options={"recipe": recipe, "compiler": "aot_eager"}
    )
    calibration = inlay.Calibration(model, inlay.Recipe.from_yaml(recipe), compiler="aot_eager")
    with torch.no_grad():
        for index in range(2):
            one = batch(model, index)
            compiled(**one)
            calibration.observe(**one)
    assert_equal_qparams(inlay.finalize(compiled), calibration.finalize())


def test_two_recipes_for_one_model(recipe: str, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    other = tmp_path / "other.yaml"
    other.write_text("preset: W8A8_STATIC\nignore: []\n")
    Path(recipe).write_text("preset: FP8\nignore: []\n")
    both = [
        torch.compile(model, backend="inlay", options={"recipe": r, "compiler": "eager"})
        for r in (recipe, str(other))
    ]
    with torch.no_grad():
        for compiled in both:
            compiled(torch.randn(2, 4))
    types = [inlay.finalize(c)["0.input"]["zero_point"].dtype for c in both]
    assert types == [torch.float8_e4m3fn, torch.int8]


@pytest.mark.parametrize(
    ("arguments", "got"),
    [
        ({}, []),
        ({"options": None}, []),
        ({"options": {}}, []),  # Dynamo passes no options on if they are empty
        ({"mode": "max-autotune"}, []),
        ({"options": {"compiler": "eager"}}, ["compiler"]),
        ({"options": {"recipe": "x.yaml", "level": 3}}, ["level", "recipe"]),
    ],
)
def test_options_are_checked(arguments: dict, got: list[str]) -> None:
    compiled = torch.compile(nn.Sequential(nn.Linear(4, 4)), backend="inlay", **arguments)
    message = rf"takes options .* of which recipe is needed; got {re.escape(str(got))}"
    with pytest.raises(Exception, match=message), torch.no_grad():
        compiled(torch.randn(2, 4))


def test_a_model_that_was_not_compiled_so() -> None:
    with pytest.raises(inlay.ConfigurationError, match="0 calibrations of this model") as error:
        inlay.finalize(nn.Linear(2, 2))
    assert "parts" not in str(error.value)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x).relu()


class Model(nn.Module):
    """Blocks, and a head that never belongs to them."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Sequential(Block(), Block())
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.part(x))


def options() -> dict:
    inputs = {"observer": "static_minmax"}
    return {"recipe": inlay.Recipe.from_preset("W8A8_STATIC", inputs=inputs), "compiler": "eager"}


def test_a_part_of_a_larger_model() -> None:
    model, x = Model(), torch.randn(3, 4)
    part, chosen = model.part, options()
    expected = expected_qparams(part, chosen["recipe"], [{"input": x}])
    with torch.no_grad():
        before = model(x)
        model.part = torch.compile(part, backend="inlay", options=chosen)
        assert torch.equal(model(x), before)
        with pytest.raises(inlay.ConfigurationError, match=r"but 1 of its parts .* finalize each"):
            inlay.finalize(model)
        assert torch.equal(model(x), before)
        found = inlay.finalize(part)
        assert not torch.equal(model(x), before)
    assert found.keys() == {f"{i}.fc.{slot}" for i in (0, 1) for slot in ("input", "weight")}
    assert_same_qparams(found, expected)
    assert inlay.finalize(model.part) is found


def test_blocks_compiled_in_place_belong_to_the_model() -> None:
    model, x = Model(), torch.randn(3, 4)
    chosen = options()
    expected = expected_qparams(model, chosen["recipe"], [{"x": x}])
    del expected["head.input"]
    for layer in model.part:
        layer.compile(backend="inlay", options=chosen)
    with torch.no_grad():
        before = model(x)
    with pytest.raises(inlay.StatisticsError, match=r"1 of 3 slots saw no data: head\.input"):
        inlay.finalize(model)
    found = inlay.finalize(model, accept={"unobserved"})
    assert "head.input" not in found
    assert_same_qparams(found, expected)
    assert inlay.finalize(model.part[1]) is found
    with torch.no_grad():
        assert not torch.equal(model(x), before)


def test_models_that_are_dropped_are_freed() -> None:
    def used() -> list[weakref.ref]:
        model, x = Model(), torch.randn(3, 4)
        compiled = torch.compile(model, backend="inlay", options=options())
        with torch.no_grad():
            compiled(x)
            inlay.finalize(compiled)
            compiled(x)
        return [weakref.ref(model), weakref.ref(model.head.weight)]

    kept = used()
    gc.collect()
    assert [ref() for ref in kept] == [None, None]


def test_a_second_model_of_the_class_is_told_what_to_do() -> None:
    models = [nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2)]
    x, chosen = torch.randn(2, 4), options()
    for model in models:
        with torch.no_grad():
            torch.compile(model, backend="inlay", options=chosen)(x)
    inlay.finalize(models[0])
    with pytest.raises(inlay.ConfigurationError, match=r"another Sequential.*compiler\.reset\(\)"):
        inlay.finalize(models[1])
    torch.compiler.reset()
    with torch.no_grad():
        torch.compile(models[1], backend="inlay", options=chosen)(x)
    assert inlay.finalize(models[1]).keys() == inlay.finalize(models[0]).keys()
