"""The errors Inlay raises. All of them are `InlayError`."""

__all__ = [
    "CheckpointError",
    "ConfigurationError",
    "GraphError",
    "InlayError",
    "ObservationError",
    "StatisticsError",
]


class InlayError(Exception):
    """Anything Inlay refuses to do, with what is wrong and what to do about it."""


class ConfigurationError(InlayError, ValueError):
    """Something was asked for that does not exist or is out of range."""


class ObservationError(InlayError, ValueError):
    """A value cannot be observed: its dtype, its rank or its size does not fit the strategy."""


class StatisticsError(InlayError, RuntimeError, ValueError):
    """Statistics are missing, not finite, or do not fit together.

    A ValueError too, which callers of llm-compressor's observers catch.
    """


class GraphError(InlayError, RuntimeError):
    """A graph is not what a pass needs or promises."""


class CheckpointError(InlayError, OSError):
    """Something could not be written; what was there before still is."""
