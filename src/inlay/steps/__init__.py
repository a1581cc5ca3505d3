"""Finalize: from statistics and weights to qparams and quantized weights, in steps."""

from inlay.steps.choose_ranges import choose_ranges
from inlay.steps.compensate import compensate
from inlay.steps.equalize import equalize
from inlay.steps.fill_experts import fill_experts
from inlay.steps.finalizing import Finalizing, Step
from inlay.steps.merge_ranks import merge_ranks

__all__ = ["STEPS", "run_steps"]

STEPS: tuple[Step, ...] = (
    merge_ranks,  # from here on, statistics are those of all ranks
    fill_experts,  # before ranges, which experts may take from their layer
    equalize,  # scales statistics and weights, and ranges follow from both
    choose_ranges,
    compensate,  # rounds to the grids that the ranges span
)


def run_steps(state: Finalizing) -> Finalizing:
    """Take statistics, weights and qparams through all steps. Over ranks, every rank calls it.

    :raises StatisticsError: if a step finds a problem that is not accepted
    """
    try:
        for step in STEPS:
            step(state)
    except Exception:
        state.statistics.forget_ranks()  # they are merged anew when asked again
        raise
    return state
