import pytest
import torch
from torch import nn

from inlay import Calibration, Recipe
from inlay.progress import watched


def test_watching_changes_nothing() -> None:
    assert list(watched(range(5), "counting", show=True)) == [0, 1, 2, 3, 4]


def test_quiet_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(watched(range(3), "counting")) == [0, 1, 2]
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""


def test_weights_are_watched_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    Calibration(model, Recipe.from_preset("W8A8"), compiler="eager", progress=True).finalize()
    assert "observing weights" in capsys.readouterr().err


@pytest.mark.parametrize("threads", [1, 2])
def test_qparams_do_not_depend_on_threads(threads: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 64), nn.Linear(64, 32))
    recipe = Recipe.from_preset("W4A16", weights={"group_size": 32, "observer": "memoryless_mse"})
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = Calibration(model, recipe, compiler="eager").finalize()
    finally:
        torch.set_num_threads(before)
    expected = Calibration(model, recipe, compiler="eager").finalize()
    for name in expected:
        assert torch.equal(found[name]["scale"], expected[name]["scale"])
