"""Runs whose recipes observe the inputs of each expert: resumed, requantized and merged."""

from pathlib import Path
from typing import Any

import pytest
import torch
from families import batch, qwen3_moe
from peer import assert_same_tensors
from safetensors.torch import load_file
from specification import assert_equal_qparams

from inlay import Calibration, Recipe, StatisticsError, StoredStatistics, calibrate
from inlay.engine.calibrate import requantize

pytestmark = pytest.mark.filterwarnings("ignore")  # what Dynamo warns of is its own

IGNORED = ["lm_head", "re:.*[.]gate$"]
EXPERTS = "model.layers.0.mlp.experts"


def recipe_of(name: str = "FP8", **fields: Any) -> Recipe:
    return Recipe.from_preset(name, ignore=IGNORED, **fields)


@pytest.fixture
def model() -> Any:
    return qwen3_moe(num_hidden_layers=1)


def batches(model: Any, count: int) -> list[dict[str, Any]]:
    found = [batch(model, index, rows=4) for index in range(count)]
    found[0]["attention_mask"][0, :2] = 0
    return found


def run(model: Any, data: Any, recipe: Recipe | None = None, **options: Any) -> Calibration:
    torch._dynamo.reset()
    options = {"compiler": "eager", "samples": None, "held_out": 0, "progress": False, **options}
    return calibrate(model, recipe or recipe_of(), data, **options)


class InterruptedRunError(Exception):
    """What a user's Ctrl-C is to a test."""


def interrupted(items: list[Any]) -> Any:
    yield from items
    raise InterruptedRunError


def test_interrupted_and_resumed_it_is_the_same(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = batches(model, 4)
    monkeypatch.setattr("inlay.engine.keeping._SAVE_EVERY", 0.0)
    with pytest.raises(InterruptedRunError):
        run(model, interrupted(data[:2]), statistics=tmp_path)
    resumed = run(model, iter(data), statistics=tmp_path, resume=True)
    whole = run(model, iter(data))
    assert any(f"{EXPERTS}.3.down_proj.input" == name for name in whole.qparams)
    assert_equal_qparams(resumed.qparams, whole.qparams)


@pytest.mark.parametrize("how", ["routed", "fill", "layer"])
def test_requantized_from_its_folder_it_is_as_if_calibrated(
    how: Any, model: Any, tmp_path: Path
) -> None:
    """Stored statistics of routed tokens serve every way to fill up those of starved experts."""
    data = batches(model, 2)
    run(model, data).save(tmp_path / "first", report=False)
    wanted = recipe_of(experts=how)
    again = requantize(model, wanted, StoredStatistics.load(tmp_path / "first"), progress=False)
    again.save(tmp_path / "again", report=False)
    run(model, data, wanted).save(tmp_path / "expected", report=False)
    found, expected = (
        load_file(tmp_path / folder / "model.safetensors") for folder in ("again", "expected")
    )
    assert f"{EXPERTS}.2.up_proj.input_scale" in expected
    assert_same_tensors(found, expected)


def test_merged_runs_are_those_of_all_data(model: Any, tmp_path: Path) -> None:
    data = batches(model, 4)
    parts = []
    for number, part in enumerate((data[:1], data[1:])):
        folder = tmp_path / str(number)
        # Of the first part alone, some experts saw too little to be finalized.
        accept = {"few_tokens"}
        run(model, part, recipe_of(experts="fill"), accept=accept, statistics=folder)
        parts.append(StoredStatistics.load(folder))
    merged = requantize(model, recipe_of(), parts[0].merge(parts[1]), progress=False)
    assert_equal_qparams(merged.qparams, run(model, data).qparams)


def test_statistics_of_dynamic_inputs_do_not_serve_static_ones(model: Any, tmp_path: Path) -> None:
    run(model, batches(model, 1), recipe_of("FP8_DYNAMIC"), statistics=tmp_path)
    with pytest.raises(StatisticsError, match=r"experts|slots saw no data|hold"):
        requantize(model, recipe_of(), StoredStatistics.load(tmp_path), progress=False)
