"""The table of number formats: the grid of each, and the error of rounding to it.

compressed-tensors owns the numbers. The table describes its formats where code needs more than a
call: to round in a form that compiles well, and to estimate errors without rounding.
"""

from dataclasses import dataclass
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationType, quant_args

from inlay.errors import ConfigurationError

__all__ = ["FORMATS", "FloatGrid", "IntegerGrid", "NumberFormat", "format_of", "name_of"]

# Averaged over one octave, the squared distance of neighbours as a share of the squared value:
# the integral of 2 ** (-2 * u) for u from 0 to 1, in units of the last bit of the mantissa.
_OF_OCTAVE = 0.5410106403333613  # 3 / (8 ln 2)


@dataclass(frozen=True, kw_only=True)
class IntegerGrid:
    """All integers of some bits, evenly spaced.

    :param steps: distance between the smallest and the largest number
    """

    steps: int
    smallest_step: float = 1.0


@dataclass(frozen=True, kw_only=True)
class FloatGrid:
    """Floating-point numbers, whose spacing grows with their size.

    :param mantissa: bits after the leading one
    :param smallest_exponent: exponent of the smallest normal number
    :param largest: the largest number
    """

    mantissa: int
    smallest_exponent: int
    largest: float

    @property
    def smallest_step(self) -> float:
        """The smallest positive number, which is also the spacing of subnormal numbers."""
        return 2.0 ** (self.smallest_exponent - self.mantissa)

    def squared_steps(self, sizes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Estimate the squared spacing around values of these sizes; rounding errs by a twelfth.

        Average over where in its octave a value may lie, so that the estimate is smooth. Add the
        spacing of subnormal numbers, where some of the values around a small size fall.
        """
        relative = _OF_OCTAVE * 4.0**-self.mantissa * sizes.square()
        return relative + (scale * self.smallest_step).square()


@dataclass(frozen=True, kw_only=True)
class NumberFormat:
    """A number format: a type and a number of bits."""

    name: str
    grid: IntegerGrid | FloatGrid


def _grid_of(numbers: Any) -> FloatGrid:
    """Describe the grid that compressed-tensors defines by bits of exponent and mantissa."""
    return FloatGrid(
        mantissa=numbers.mantissa,
        smallest_exponent=2 - 2 ** (numbers.exponent - 1),
        largest=numbers.max,
    )


# compressed-tensors has FP6 since 0.20.
_FLOATS = {4: "FP4_E2M1_DATA", 6: "FP6_E2M3_DATA", 8: "FP8_E4M3_DATA"}

FORMATS: dict[tuple[str, int], NumberFormat] = {
    **{
        ("int", bits): NumberFormat(name=f"int{bits}", grid=IntegerGrid(steps=2**bits - 1))
        for bits in range(2, 9)
    },
    **{
        ("float", bits): NumberFormat(name=f"float{bits}", grid=_grid_of(getattr(quant_args, name)))
        for bits, name in _FLOATS.items()
        if hasattr(quant_args, name)
    },
}


def format_of(args: QuantizationArgs) -> NumberFormat:
    """Look up the number format of arguments.

    :raises ConfigurationError: if it is not in the table
    """
    found = FORMATS.get((QuantizationType(args.type).value, args.num_bits))
    if found is None:
        known = ", ".join(each.name for each in FORMATS.values())
        raise ConfigurationError(
            f"there is no number format {name_of(args)}; set type and num_bits to one of {known}"
        )
    return found


def name_of(args: QuantizationArgs) -> str:
    """Name the type and bits of arguments, such as "int8", also if no format has them."""
    return f"{QuantizationType(args.type).value}{args.num_bits}"
