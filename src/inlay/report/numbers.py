"""Formatting of numbers in the report. `text.js` does the same in the browser."""

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from inlay.report.data import Interval

__all__ = ["MISSING", "count", "duration", "measured", "number", "size"]

MISSING = "–"  # noqa: RUF001


def number(value: float | None) -> str:
    """Format a number with four digits, and a power of ten if zeros would hide them."""
    if value is None or math.isnan(value):
        return MISSING
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    if value == 0:
        return "0"
    if not 1e-3 <= abs(value) < 1e5:
        return f"{value:.2e}"
    return f"{value:.4g}" if abs(value) < 9999.5 else f"{value:.0f}"


def measured(value: float | None, interval: "Interval | None" = None) -> str:
    """Format a number with the interval it may lie in."""
    if interval is None:
        return number(value)
    return f"{number(value)} ({number(interval.low)} to {number(interval.high)})"


def count(value: int) -> str:
    """Format a count with commas."""
    return f"{value:,}"


def size(value: float) -> str:
    """Format bytes in powers of a thousand, as disks and model hubs do."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if abs(value) < 999.5:  # larger values would be rounded up to 1000
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB"


def duration(seconds: float) -> str:
    """Format seconds as seconds, minutes or hours."""
    if not math.isfinite(seconds):
        return MISSING
    if seconds < 0.1:
        return "under 0.1 s"
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"
