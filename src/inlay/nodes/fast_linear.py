"""A linear layer whose product is left to oneDNN."""

from typing import Any

import torch
import torch.nn.functional as F

from inlay.torch_private import onednn_linear

__all__ = ["fast_linear", "is_float32_on_cpu"]


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


def is_float32_on_cpu(value: Any) -> bool:
    """Return whether a value is a tensor that oneDNN multiplies faster on some processors."""
    return (
        isinstance(value, torch.Tensor)
        and value.dtype == torch.float32
        and value.device.type == "cpu"
    )
