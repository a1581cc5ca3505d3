"""`backend="inlay"`, found through its entry point."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from families import batch, llama
from torch import nn

import inlay

pytestmark = pytest.mark.slow

RECIPE = "preset: FP8\nignore: [lm_head]\n"


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    file = tmp_path / "recipe.yaml"
    file.write_text(RECIPE)
    torch._dynamo.reset()
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
    model, one = llama(), None
    compiled = torch.compile(
        model, backend="inlay", options={"recipe": recipe, "compiler": "aot_eager"}
    )
    calibration = inlay.Calibration(model, inlay.Recipe.from_yaml(recipe), compiler="aot_eager")
    with torch.no_grad():
        for index in range(2):
            one = batch(model, index)
            compiled(**one)
            calibration.observe(**one)
    found, expected = inlay.finalize(compiled), calibration.finalize()
    assert found.keys() == expected.keys()
    for name in expected:
        assert torch.equal(found[name]["scale"], expected[name]["scale"])


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


def test_options_are_checked() -> None:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(4, 4))
    for options in ({}, {"recipe": RECIPE, "mode": "fast"}):
        compiled = torch.compile(model, backend="inlay", options=options or {"x": 1})
        with pytest.raises(Exception, match="takes options"), torch.no_grad():
            compiled(torch.randn(2, 4))


def test_a_model_that_was_not_compiled_so() -> None:
    with pytest.raises(inlay.ConfigurationError, match="0 calibrations of this model"):
        inlay.finalize(nn.Linear(2, 2))
