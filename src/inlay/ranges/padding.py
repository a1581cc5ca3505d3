"""Exclude invalid observations, the padding of a batch, without changing shapes."""

import torch

from inlay.ranges.row_groups import beside

__all__ = ["as_weights", "fill_invalid"]


def fill_invalid(observed: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """Replace each invalid observation by the first valid one.

    This suits statistics that stay the same if a value occurs more than once.

    :param observed: of shape (num_observations, ...)
    :param valid: of shape (num_observations,), at least one of them true
    """
    first = observed.index_select(0, valid.to(torch.int8).argmax(0, keepdim=True))
    return torch.where(beside(valid, observed), observed, first)


def as_weights(valid: torch.Tensor, observed: torch.Tensor) -> torch.Tensor:
    """Return 1 for valid observations and 0 for others, to be multiplied with `observed`."""
    return beside(valid, observed).to(torch.promote_types(observed.dtype, torch.float32))
