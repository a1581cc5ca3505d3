"""The state that the steps of finalize share."""

from collections.abc import Callable
from dataclasses import dataclass, field

from inlay.observers import QParamsDict
from inlay.recipe import Plan
from inlay.statistics.by_slot import StatisticsBySlot
from inlay.steps.weights import Weights

__all__ = ["Compensation", "Finalizing", "Step"]


@dataclass(frozen=True, kw_only=True)
class Compensation:
    """How much compensation gained for a weight.

    :param signal: squared outputs of the layer, summed over tokens
    :param before: squared errors of the outputs with the weight rounded to nearest
    :param after: the same with the weight compensated
    :param damping: the damping that its Hessian needed, relative to the mean of its diagonal
    :param failed: whether the Hessian could not be factorized, so the weight is rounded to nearest
    """

    signal: float
    before: float
    after: float
    damping: float
    failed: bool


@dataclass(kw_only=True)
class Finalizing:
    """Statistics, weights and qparams on their way through the steps.

    :param plan: the plan of the statistics, or a part of it
    :param equalize: decides how inputs are equalized, and scales statistics and weights
    :param accept: problems to accept instead of raising, of `ACCEPTABLE`
    :param last_batch: see `StatisticsBySlot.merge_ranks`
    :param qparams: those found so far, by slot
    :param compensations: of weights that were compensated, by module
    """

    statistics: StatisticsBySlot
    plan: Plan
    weights: Weights
    equalize: Callable[[], None]
    accept: frozenset[str] = frozenset()
    progress: bool | None = None
    last_batch: int = 0
    qparams: dict[str, QParamsDict] = field(default_factory=dict)
    compensations: dict[str, Compensation] = field(default_factory=dict)


Step = Callable[[Finalizing], None]
