"""Round as eager PyTorch does, in forms that a compiler keeps and can vectorize.

Inductor computes half precision in float32 and rounds only what it stores, so a quantized value
would differ from the eager one. It cannot remove rounding done by arithmetic on the bits.
"""

from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.utils import calculate_range
from torch.overrides import TorchFunctionMode

from inlay.formats.numbers import FloatGrid, format_of
from inlay.torch_private import without_fake_mode, without_torch_function

__all__ = [
    "EagerRounding",
    "as_rounded",
    "format_range",
    "quantize_dequantize",
    "stored",
]

_HALVES = (torch.bfloat16, torch.float16)


class EagerRounding(TorchFunctionMode):
    """Round and store every half-precision result while active, whoever compiles it later.

    Results are stored because rounding reads the bits more than once: in a chain of roundings,
    Inductor would repeat the source twice as often for each link.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dtype in _HALVES:
            return stored(as_rounded(result.float(), result.dtype).to(result.dtype))
        return result


def stored(value: torch.Tensor) -> torch.Tensor:
    """Make Inductor store the value in memory, not compute it again wherever it is used.

    Inductor does not look behind a tensor that is viewed with explicit strides.
    """
    with without_torch_function():
        value = value.contiguous()
        return value.as_strided(value.shape, value.stride())


def as_rounded(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round a float32 value to a number of `dtype`, if that is bfloat16 or float16."""
    if dtype == torch.bfloat16:
        bits = value.view(torch.int32)
        # Add half a unit, less the lowest bit if the last kept one is zero: ties go to even.
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).view(torch.float32)
    if dtype == torch.float16:
        rounded = _to_grid(value, mantissa=10, smallest_exponent=-14)
        return (rounded * 2.0**112) * 2.0**-112  # 2 ** 16, the first beyond range, overflows to inf
    return value


def quantize_dequantize(
    value: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    args: QuantizationArgs,
    dtype: torch.dtype,
    *,
    inverse: torch.Tensor | None = None,
) -> torch.Tensor:
    """Do what `fake_quantize` of compressed-tensors does for values of `dtype`, bit for bit.

    Pass halves as float32; they are rounded wherever `fake_quantize` would round them. Without a
    zero point, as in symmetric formats, two operations are saved. With the inverse of the scale
    the result is a little less exact and faster to compute.
    """
    scaled = as_rounded(value / scale if inverse is None else value * inverse, dtype)
    if zero_point is not None:
        scaled = as_rounded(scaled + zero_point, dtype)
    low, high = (float(bound) for bound in format_range(args))
    quantized = _round(scaled.clamp(low, high), args)
    if zero_point is not None:
        quantized = quantized - zero_point
        # Both dtypes hold all integers up to 256. Each rounding that is left out halves what
        # Inductor compiles, for it reads its argument twice.
        if isinstance(format_of(args).grid, FloatGrid):
            quantized = as_rounded(quantized, dtype)
    return as_rounded(quantized * scale, dtype)


def format_range(args: QuantizationArgs) -> tuple[float, float]:
    """Return the smallest and the largest number of the format."""
    # compressed-tensors caches these tensors forever, so they must be real ones.
    with without_fake_mode():
        low, high = calculate_range(args, torch.device("cpu"))
        return float(low), float(high)


def _round(value: torch.Tensor, args: QuantizationArgs) -> torch.Tensor:
    grid = format_of(args).grid
    if not isinstance(grid, FloatGrid):
        return value.round()
    return _to_grid(value, mantissa=grid.mantissa, smallest_exponent=grid.smallest_exponent)


def _to_grid(value: torch.Tensor, *, mantissa: int, smallest_exponent: int) -> torch.Tensor:
    """Round to the numbers of a small float format, ties to even.

    Adding a number so large that the last bit of the sum is worth one step of the format, and
    subtracting it again, rounds the value. The number is one and a half times a power of two, so
    that the sum has the same exponent for either sign.
    """
    if value.dtype == torch.float64:
        exponent = value.abs().clamp(min=2.0**smallest_exponent).log2().floor()
        large = 1.5 * torch.exp2(exponent + (52 - mantissa))
    else:
        bits = value.abs().clamp(min=2.0**smallest_exponent).view(torch.int32)
        shift = ((23 - mantissa) << 23) + (1 << 22)
        large = ((bits & 0x7F800000) + shift).view(torch.float32)
    return (value + large) - large
