"""The report of a calibration: one HTML file that needs nothing else."""

from inlay.report.data import (
    Change,
    Distribution,
    Finding,
    LayerError,
    ReportData,
    SlotRecord,
    Stage,
)
from inlay.report.page import render, write

__all__ = [
    "Change",
    "Distribution",
    "Finding",
    "LayerError",
    "ReportData",
    "SlotRecord",
    "Stage",
    "render",
    "write",
]
