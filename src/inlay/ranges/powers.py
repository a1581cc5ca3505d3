"""Powers of differences, without a transcendental function for each element where there is a way.

A kernel that searches ranges takes the power of every element once per candidate, and `pow` would
be nearly all of its time. Whole exponents are products, halves end in a square root, and fifths
in a fifth root that is guessed from the bits of the number and refined by arithmetic alone.
"""

from fractions import Fraction

import torch

__all__ = ["absolute_power", "power_six_fifths"]

# Bits of a float32 read as a number are nearly its logarithm, so a multiple of them is nearly the
# bits of a power. With this offset the guess of a ** (-1/5) leaves h of -0.152 to 0.157 below.
_GUESS = 1277900000.0
# The polynomial of h with the smallest largest relative error to (1 - h) ** (-4/5) there, 2e-8.
_POWER = (1.0, 0.8000009, 0.7200031, 0.6717041, 0.637808, 0.6375118, 0.6264505)


def absolute_power(value: torch.Tensor, exponent: float) -> torch.Tensor:
    """The power of the absolute value, to within a few units in the last place.

    The forms are those that read their argument once: Inductor writes an expression out as often
    as it is read, and its compile time grows with that.
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
    # Below, d**2 is taken to the power 6/5 and the rest of the exponent must be whole.
    remaining = fraction - Fraction(12, 5)
    if remaining.denominator == 1 and remaining >= 0 and value.dtype == torch.float32:
        power = power_six_fifths(value.pow(2))
        return power * magnitude.pow(int(remaining)) if remaining else power
    return magnitude.pow(exponent)


def power_six_fifths(a: torch.Tensor) -> torch.Tensor:
    """The power 1.2 of float32 numbers that are not negative, with a relative error below 3e-7.

    y guesses a ** (-1/5). With r = a y⁴ and h = 1 - r y, the fifth root of a is r (1 - h) ** (-4/5)
    exactly, and over the h that the guess leaves, a polynomial stands for that power. It is
    written as a tree, since the processor waits for the longest chain of operations rather than
    for their number. Infinity gives NaN.
    """
    bits = a.view(torch.int32).to(torch.float32)
    y = (_GUESS - 0.2 * bits).to(torch.int32).view(torch.float32)
    r = a * y.pow(4)
    h = 1 - r * y
    h2 = h.pow(2)
    c0, c1, c2, c3, c4, c5, c6 = _POWER
    tail = (c4 + c5 * h) + c6 * h2
    return (a * r) * ((c0 + c1 * h) + h2 * ((c2 + c3 * h) + h2 * tail))
