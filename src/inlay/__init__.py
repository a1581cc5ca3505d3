"""Inlay calibrates PyTorch models for quantization inside their own graph."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from inlay._version import __version__
from inlay.errors import (
    ConfigurationError,
    GraphError,
    InlayError,
    ObservationError,
    RankError,
    StatisticsError,
)

if TYPE_CHECKING:
    from inlay import observers, passes
    from inlay.calibration import Calibration
    from inlay.calibration.named_backend import finalize
    from inlay.comparison import compare
    from inlay.engine.calibrate import calibrate
    from inlay.engine.stream import stream
    from inlay.observers import Observer, QParamsDict, sync_observers
    from inlay.recipe import Recipe
    from inlay.searching import search
    from inlay.serving import load, package
    from inlay.statistics.on_disk import StoredStatistics

__all__ = [
    "Calibration",
    "ConfigurationError",
    "GraphError",
    "InlayError",
    "ObservationError",
    "Observer",
    "QParamsDict",
    "RankError",
    "Recipe",
    "StatisticsError",
    "StoredStatistics",
    "__version__",
    "calibrate",
    "compare",
    "finalize",
    "load",
    "observers",
    "package",
    "passes",
    "search",
    "stream",
    "sync_observers",
]

# compressed-tensors imports transformers. Whoever only imports inlay does not pay for that.
_LAZY = {
    "Calibration": "inlay.calibration",
    "Observer": "inlay.observers",
    "QParamsDict": "inlay.observers",
    "Recipe": "inlay.recipe",
    "StoredStatistics": "inlay.statistics.on_disk",
    "calibrate": "inlay.engine.calibrate",
    "compare": "inlay.comparison",
    "finalize": "inlay.calibration.named_backend",
    "load": "inlay.serving",
    "package": "inlay.serving",
    "search": "inlay.searching",
    "stream": "inlay.engine.stream",
    "sync_observers": "inlay.observers",
}
_LAZY_MODULES = ("observers", "passes")


def __getattr__(name: str) -> Any:
    if name in _LAZY_MODULES:
        return import_module(f"inlay.{name}")
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'inlay' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
