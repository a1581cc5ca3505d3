"""A linear layer whose product is left to oneDNN."""

import torch
import torch.nn.functional as F

from inlay.torch_private import onednn_linear

__all__ = ["fast_linear"]


def fast_linear(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Do what `F.linear` does, up to rounding, by oneDNN where that is possible.

    oneDNN's op knows neither gradients nor autocast nor empty values.
    """
    is_differentiated = torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in (input, weight, bias)
    )
    if is_differentiated or input.ndim < 2 or 0 in input.shape or torch.is_autocast_enabled("cpu"):
        return F.linear(input, weight, bias)
    return onednn_linear(input, weight, bias)
