"""Linear layers whose weight alone is quantized, computed from the weight as it is stored.

A kernel that reads packed weights pays for few rows, where reading the weight takes most of the
time: one row by 576x1536 took 0.024 ms from int8 or int4 and 0.062 in bfloat16. It is slow for
many: 64 rows took 0.74 ms, 0.48 with the weight dequantized first, and 0.27 in bfloat16 (AMD EPYC,
one thread, medians of 25 runs).
"""

from functools import cache

import torch
import torch.nn.functional as F

from inlay.torch_private import int4_packed, int4_packed_product, int8_weight_product

__all__ = ["BLOCK", "int4_linear", "int8_linear", "is_known_order", "packed_int4", "unpacked_int4"]

FEW_ROWS = 32
BLOCK = 64  # outputs that are packed together
_ZERO = 8  # is stored for the integer 0


def int8_linear(
    value: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Return a linear layer with an int8 weight.

    :param scale: one for each row of the weight
    """
    *lead, length = value.shape
    rows, scale = value.reshape(-1, length), scale.to(value.dtype)
    if rows.shape[0] > FEW_ROWS:
        return F.linear(value, weight.to(value.dtype) * scale.unsqueeze(1), bias)
    result = int8_weight_product(rows, weight, scale).reshape(*lead, weight.shape[0])
    return result if bias is None else result + bias


def int4_linear(
    value: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Return a linear layer with a weight of 4-bit integers, as `packed_int4` returned it.

    :param scales: of shape (groups, outputs)
    """
    *lead, length = value.shape
    rows, scales = value.reshape(-1, length), scales.to(value.dtype)
    groups, outputs = scales.shape
    if rows.shape[0] > FEW_ROWS:
        integers = unpacked_int4(packed, outputs).to(value.dtype)
        grouped = integers.reshape(outputs, groups, -1) * scales.t().unsqueeze(2)
        return F.linear(value, grouped.reshape(outputs, length), bias)
    product = int4_packed_product(rows, packed, length // groups, scales)
    result = product.reshape(*lead, outputs)
    return result if bias is None else result + bias


def packed_int4(integers: torch.Tensor) -> torch.Tensor:
    """Pack integers from -8 to 7, two in a byte, in the order of the kernel."""
    return int4_packed(integers.to(torch.int32) + _ZERO)


def unpacked_int4(packed: torch.Tensor, outputs: int) -> torch.Tensor:
    """Return the integers of a packed weight, in int8.

    A block holds 64 rows. For each column it has 32 bytes, with the rows from 0 in their lower and
    those from 32 in their upper halves.
    """
    blocks = packed.reshape(outputs // BLOCK, -1, BLOCK // 2)
    halves = torch.cat((blocks & 15, blocks >> 4), -1).to(torch.int8) - _ZERO
    return halves.transpose(1, 2).reshape(outputs, -1)


@cache
def is_known_order() -> bool:
    """Return whether this torch packs weights on this processor in the order known here."""
    integers = (torch.arange(BLOCK * 32) * 7 % 16 - _ZERO).reshape(BLOCK, 32).to(torch.int8)
    return torch.equal(unpacked_int4(packed_int4(integers), BLOCK), integers)
