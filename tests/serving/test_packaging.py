"""A package runs where Inlay is not installed."""

import gc
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

import inlay
from inlay import Calibration, ConfigurationError, Recipe
from inlay.nodes import kernel_support
from inlay.nodes.kernel_support import missing_kernels
from inlay.serving.loading import weight_bytes

# `None` makes an import fail.
ALONE = """
import sys
sys.modules["inlay"] = sys.modules["transformers"] = None
import torch
value, expected = torch.load({tensors!r})
found = torch._inductor.aoti_load_package({package!r})(value)
torch.testing.assert_close(found, expected)
"""


@pytest.fixture(autouse=True)
def with_small_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels compute small layers too; they pay for large ones only."""
    monkeypatch.setattr(kernel_support, "SMALLEST", {})


@pytest.mark.slow
def test_a_package_loads_without_inlay(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, value = nn.Sequential(nn.Linear(16, 8)), torch.randn(2, 3, 16)
    calibration = Calibration(model, Recipe.from_preset("W8A8"))
    calibration.finalize()
    quantized = calibration.quantized_module(value)
    path = inlay.package(quantized, tmp_path / "model.pt2", value)
    with torch.no_grad():
        torch.save((value, quantized(value)), tmp_path / "tensors.pt")
    code = ALONE.format(tensors=str(tmp_path / "tensors.pt"), package=str(path))
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_package_has_a_suffix(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"ends in \.pt2"):
        inlay.package(nn.Linear(2, 2), tmp_path / "model", torch.ones(1, 2))


def test_a_quantized_module_lets_go_of_weights_in_full_precision() -> None:
    model, value = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8)), torch.ones(2, 64)
    calibration = Calibration(model, Recipe.from_preset("W8A8"))
    calibration.finalize()
    quantized = calibration.quantized_module(value)
    expected = quantized(value)
    weight = weakref.ref(model[0].weight)
    del model, calibration
    gc.collect()
    assert weight() is None
    outputs = 32 + 8  # each with a scale and a bias in float32
    if missing_kernels("cpu") is None:
        assert weight_bytes(quantized) == 64 * 32 + 32 * 8 + outputs * (4 + 4)
    assert torch.equal(quantized(value), expected)
