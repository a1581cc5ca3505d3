"""Scale what equalization scales."""

from inlay.steps.finalizing import Finalizing

__all__ = ["equalize"]


def equalize(state: Finalizing) -> None:
    """Scale the statistics and the weights of equalized inputs."""
    state.equalize()
