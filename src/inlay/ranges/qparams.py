"""From a range to the scale and zero point that quantize it."""

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
    """What `calculate_qparams` of compressed-tensors says, with one hole closed.

    Asymmetric and over nothing but zeros it divides zero by zero: the zero point is NaN in a float
    format, and in an integer one whatever the machine makes of NaN. Here it is zero.
    """
    scale, zero_point = calculate_qparams(min_vals, max_vals, args, global_scale)
    if not args.symmetric:
        only_zeros = ((min_vals >= 0) & (max_vals <= 0)).reshape(zero_point.shape)
        zero_point = zero_point.float().masked_fill(only_zeros, 0).to(zero_point.dtype)
    return scale, zero_point
