from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from inlay import Calibration, Recipe
from inlay.progress import watched


def test_items_pass_through_a_bar(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(watched(range(5), "counting", show=True)) == [0, 1, 2, 3, 4]
    assert "counting" in capsys.readouterr().err


def test_quiet_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(watched(range(3), "counting")) == [0, 1, 2]
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""


def test_weights_are_watched_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    Calibration(model, Recipe.from_preset("W8A8"), compiler="eager", progress=True).finalize()
    assert "observing weights" in capsys.readouterr().err


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("strategy", ["tensor", "channel"])
def test_qparams_do_not_depend_on_threads(strategy: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(3)))
    recipe = Recipe.from_preset(
        "W8A8", weights={"strategy": strategy, "observer": "memoryless_mse"}
    )
    found, sums = [], []
    for count in (1, 2):
        with threads(count):
            found.append(Calibration(model, recipe, compiler="eager").finalize())
            sums.append([float(p.detach().abs().sum()) for p in model.parameters()])
    # Weights of this size are divided between threads: plain sums of them show it.
    assert sums[0] != sums[1]
    one, two = found
    assert one.keys() == two.keys()
    for name, qparams in one.items():
        for key in ("scale", "zero_point"):
            assert torch.equal(qparams[key], two[name][key]), (name, key)
