"""Give experts that saw few tokens the statistics of their layer."""

from inlay.statistics import coverage
from inlay.steps.finalizing import Finalizing

__all__ = ["fill_experts"]


def fill_experts(state: Finalizing) -> None:
    """Refuse experts that saw too few tokens, or fill them from their layer if the recipe says so.

    :raises StatisticsError: if scales would rest on too few tokens, and that is not accepted
    """
    coverage.require_coverage(state.statistics, state.accept, state.plan)
    coverage.fill_experts(state.statistics, state.plan)
