"""The errors Inlay raises. All of them are `InlayError`."""

__all__ = [
    "CheckError",
    "CheckpointError",
    "ConfigurationError",
    "GraphError",
    "InlayError",
    "ObservationError",
    "RankError",
    "StatisticsError",
]


class InlayError(Exception):
    """Base class of all errors; the message says what is wrong and what to do about it."""


class ConfigurationError(InlayError, ValueError):
    """A setting names something that does not exist, or is out of range."""


class ObservationError(InlayError, ValueError):
    """A value cannot be observed: its dtype, rank or size does not fit the strategy."""


class StatisticsError(InlayError, RuntimeError, ValueError):
    """Statistics are missing, not finite, or do not fit together.

    It is also a ValueError, which callers of llm-compressor's observers catch.
    """


class GraphError(InlayError, RuntimeError):
    """A graph violates what a pass requires or ensures."""


class CheckError(InlayError, AssertionError):
    """A calibration differs from something simpler that it was held against."""


class CheckpointError(InlayError, OSError):
    """A file or folder could not be written; an earlier one in its place is unchanged."""


class RankError(InlayError, RuntimeError):
    """Another process of the group failed or ended, so this one cannot go on.

    :ivar rank: the rank of that process
    """

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank

    def __reduce__(self) -> tuple[type["RankError"], tuple[int, str]]:
        return RankError, (self.rank, str(self))  # to be sent to other processes
