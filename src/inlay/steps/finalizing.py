"""The state that the steps of finalize share."""

from collections.abc import Callable
from dataclasses import dataclass, field

from inlay.observers import QParamsDict
from inlay.recipe import Plan
from inlay.statistics.by_slot import StatisticsBySlot
from inlay.steps.weights import Weights

__all__ = ["Finalizing", "Step"]


@dataclass(kw_only=True)
class Finalizing:
    """Statistics, weights and qparams on their way through the steps.

    :param plan: the plan of the statistics, or a part of it
    :param equalize: decides how inputs are equalized, and scales statistics and weights
    :param accept: problems to accept instead of raising, of `ACCEPTABLE`
    :param qparams: those found so far, by slot
    """

    statistics: StatisticsBySlot
    plan: Plan
    weights: Weights
    equalize: Callable[[], None]
    accept: frozenset[str] = frozenset()
    progress: bool | None = None
    qparams: dict[str, QParamsDict] = field(default_factory=dict)


Step = Callable[[Finalizing], None]
