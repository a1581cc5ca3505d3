"""Compute the scale and zero point that quantize a range."""

import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.utils import calculate_qparams

__all__ = ["qparams_of_range"]


def qparams_of_range(
    min_vals: torch.Tensor,
    max_vals: torch.Tensor,
    args: QuantizationArgs,
    global_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Call `calculate_qparams` of compressed-tensors, with a zero point of 0 for all-zero ranges.

    For an asymmetric range of nothing but zeros it divides zero by zero: the zero point would be
    NaN in a float format, and whatever the machine converts NaN to in an integer format.
    """
    scale, zero_point = calculate_qparams(min_vals, max_vals, args, global_scale)
    if not args.symmetric:
        only_zeros = ((min_vals >= 0) & (max_vals <= 0)).reshape(zero_point.shape)
        zero_point = zero_point.float().masked_fill(only_zeros, 0).to(zero_point.dtype)
    return scale, zero_point
