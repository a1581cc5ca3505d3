"""Checking that Inlay gets a model right: against something simpler, at every step."""

from inlay.checking.check import CheckedCalibration, check_calibration

__all__ = ["CheckedCalibration", "check_calibration"]
