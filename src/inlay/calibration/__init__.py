"""Observe a model while it runs, then let it run quantized."""

from inlay.calibration.calibration import Calibration

__all__ = ["Calibration"]
