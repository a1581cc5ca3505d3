"""Observations that count, among those that do not: the padding of a batch."""

import torch

__all__ = ["as_weights", "fill_invalid"]


def fill_invalid(observed: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """Put the first valid observation in place of each that is not.

    For statistics to which it is the same whether a value occurs once or twice.

    :param observed: of shape (num_observations, ...)
    :param valid: of shape (num_observations,), at least one of them true
    """
    first = observed.index_select(0, valid.to(torch.int8).argmax(0, keepdim=True))
    return torch.where(_beside(valid, observed), observed, first)


def as_weights(valid: torch.Tensor, observed: torch.Tensor) -> torch.Tensor:
    """One for what is valid, zero for the rest, to be multiplied with `observed`."""
    return _beside(valid, observed).to(torch.promote_types(observed.dtype, torch.float32))


def _beside(valid: torch.Tensor, observed: torch.Tensor) -> torch.Tensor:
    return valid.reshape(-1, *[1] * (observed.ndim - 1))
