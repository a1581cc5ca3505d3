"""Phases of a calibration."""

from enum import Enum

__all__ = ["Phase"]


class Phase(Enum):
    """What a traced graph is prepared for.

    Statistics decide between the first three: whether they are final, and which run over the
    data. The last two are asked for when graphs run again.
    """

    OBSERVE = "observe"
    OBSERVE_EQUALIZED = "observe equalized"
    QUANTIZE = "quantize"
    COMPARE = "compare"
    PLAIN = "plain"

    @property
    def observes(self) -> bool:
        return self in (Phase.OBSERVE, Phase.OBSERVE_EQUALIZED)
