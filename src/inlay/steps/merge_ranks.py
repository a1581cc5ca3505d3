"""Merge the statistics of all ranks."""

from inlay.steps.finalizing import Finalizing

__all__ = ["merge_ranks"]


def merge_ranks(state: Finalizing) -> None:
    """Let the statistics be those of all ranks from now on."""
    state.statistics.merge_ranks(state.plan)
