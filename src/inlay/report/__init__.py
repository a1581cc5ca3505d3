"""The report of a calibration: one HTML file that needs nothing else."""

from inlay.report.data import (
    Change,
    Distribution,
    EqualizedValue,
    Estimate,
    ExpertLayer,
    Finding,
    Interval,
    LayerError,
    ReportData,
    SlotRecord,
    Stage,
    UnequalizedValue,
)
from inlay.report.page import render, write

__all__ = [
    "Change",
    "Distribution",
    "EqualizedValue",
    "Estimate",
    "ExpertLayer",
    "Finding",
    "Interval",
    "LayerError",
    "ReportData",
    "SlotRecord",
    "Stage",
    "UnequalizedValue",
    "render",
    "write",
]
