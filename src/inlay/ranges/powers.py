"""Compute powers of differences, avoiding a transcendental function per element where possible.

A kernel that searches ranges takes the power of every element once per candidate, and would spend
nearly all its time in `pow`. Whole exponents become products, halves end in a square root, and
fifths in a fifth root that is guessed from the bits of the number and refined by arithmetic alone.
"""

from fractions import Fraction

import torch

__all__ = ["absolute_power", "power_in_place", "power_six_fifths"]

# The bits of a float32, read as an integer, approximate its logarithm, so a multiple of them
# approximates the bits of a power. With this offset the guess of a ** (-1/5) keeps h, defined in
# `power_six_fifths`, between -0.152 and 0.157.
_GUESS = 1277900000.0
# Minimax polynomial of h for (1 - h) ** (-4/5) on that interval, with a relative error of 2e-8.
_POWER = (1.0, 0.8000009, 0.7200031, 0.6717041, 0.637808, 0.6375118, 0.6264505)


def absolute_power(value: torch.Tensor, exponent: float) -> torch.Tensor:
    """Raise the absolute value to a power, to within a few units in the last place.

    Inductor repeats an expression for each time it is read, and its compile time grows with that.
    So each form reads its argument once, except the fifth root, which is worth it.
    """
    fraction = Fraction(exponent).limit_denominator(10)
    if abs(fraction - Fraction(exponent)) > 1e-12 * exponent or fraction >= 16:
        return value.abs().pow(exponent)
    whole, rest = divmod(fraction, 1)
    magnitude = value.abs()
    if rest == 0:
        return value.pow(int(whole)) if whole % 2 == 0 else magnitude.pow(int(whole))
    if rest == Fraction(1, 2):
        root = magnitude.sqrt()
        return magnitude.pow(int(whole)) * root if whole else root
    # The next form raises d**2 to the power 6/5; the rest of the exponent must be whole.
    remaining = fraction - Fraction(12, 5)
    if remaining.denominator == 1 and remaining >= 0 and value.dtype == torch.float32:
        power = power_six_fifths(value.pow(2))
        return power * magnitude.pow(int(remaining)) if remaining else power
    return magnitude.pow(exponent)


def power_six_fifths(a: torch.Tensor) -> torch.Tensor:
    """Raise non-negative float32 numbers to the power 1.2, with a relative error below 3e-7.

    y guesses a ** (-1/5). With r = a y⁴ and h = 1 - r y, the fifth root of a is exactly
    r (1 - h) ** (-4/5), and a polynomial approximates that power over the h that the guess leaves.
    The polynomial is evaluated as a tree, since the time depends on the longest chain of
    operations rather than on their number. Infinity gives NaN.
    """
    bits = a.view(torch.int32).to(torch.float32)
    y = (_GUESS - 0.2 * bits).to(torch.int32).view(torch.float32)
    r = a * y.pow(4)
    h = 1 - r * y
    h2 = h.pow(2)
    c0, c1, c2, c3, c4, c5, c6 = _POWER
    tail = (c4 + c5 * h) + c6 * h2
    return (a * r) * ((c0 + c1 * h) + h2 * ((c2 + c3 * h) + h2 * tail))


def power_in_place(magnitude: torch.Tensor, exponent: float) -> torch.Tensor:
    """Raise non-negative numbers to a power in place and uncompiled, to within a few units.

    Uncompiled, `pow` takes longer than all else that a loss consists of, and several times as long
    as a logarithm and an exponential. These lose digits where the logarithm is large. So the whole
    part of the exponent is a product, and only the fraction is left to them.
    """
    whole, rest = divmod(exponent, 1.0)
    if magnitude.dtype != torch.float32 or rest == 0:
        return magnitude.pow_(exponent)
    power = magnitude.log().mul_(rest).exp_()
    return magnitude.pow_(whole).mul_(power) if whole else power
