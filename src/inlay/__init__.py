"""Inlay calibrates PyTorch models for quantization inside their own graph."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from inlay._version import __version__
from inlay.errors import (
    ConfigurationError,
    GraphError,
    InlayError,
    ObservationError,
    StatisticsError,
)

if TYPE_CHECKING:
    from inlay import observers, passes
    from inlay.observers import Observer, QParamsDict, sync_observers

__all__ = [
    "ConfigurationError",
    "GraphError",
    "InlayError",
    "ObservationError",
    "Observer",
    "QParamsDict",
    "StatisticsError",
    "__version__",
    "observers",
    "passes",
    "sync_observers",
]

# compressed-tensors imports transformers. Whoever only imports inlay does not pay for that.
_LAZY = {
    "Observer": "inlay.observers",
    "QParamsDict": "inlay.observers",
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
