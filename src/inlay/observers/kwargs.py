"""Declare and check the `observer_kwargs` of observers."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from inlay.errors import ConfigurationError

__all__ = [
    "AVERAGING_CONSTANT",
    "Kwarg",
    "count",
    "expansion",
    "fraction",
    "one_of",
    "percent",
    "positive",
    "read_kwargs",
    "switch",
    "whole",
]


@dataclass(frozen=True, kw_only=True)
class Kwarg:
    """One entry of `observer_kwargs`: its default, and its allowed values in words and code."""

    name: str
    default: Any
    allowed: str
    accepts: Callable[[Any], bool]
    attribute: str | None = None  # the observer's attribute, if not called `name`

    def __str__(self) -> str:
        return f"{self.name} ({self.allowed}; default {self.default})"


def read_kwargs(
    owner: str, kwargs: Iterable[Kwarg], given: Mapping[str, Any], *, closed: bool
) -> dict[str, Any]:
    """Collect the values of all `kwargs` by attribute, as given or by default.

    :param owner: the observer to name in errors
    :param closed: refuse names in `given` that are not among `kwargs`
    """
    known = {kwarg.name: kwarg for kwarg in kwargs}
    allowed = "; ".join(map(str, known.values())) or "none"
    unknown = sorted(set(given) - set(known)) if closed else []
    if unknown:
        raise ConfigurationError(
            f"{owner} does not take the observer_kwargs {', '.join(unknown)}. Allowed: {allowed}"
        )
    values = {}
    for name, kwarg in known.items():
        value = values[kwarg.attribute or name] = given.get(name, kwarg.default)
        if not kwarg.accepts(value):
            raise ConfigurationError(
                f"{owner}: {name} must be {kwarg.allowed}, got {value!r}. Allowed: {allowed}"
            )
    return values


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def fraction(name: str, default: float, *, attribute: str | None = None) -> Kwarg:
    return Kwarg(
        name=name,
        attribute=attribute,
        default=default,
        allowed="a number from 0 to 1",
        accepts=lambda value: _is_number(value) and 0 <= value <= 1,
    )


def positive(name: str, default: float) -> Kwarg:
    return Kwarg(
        name=name,
        default=default,
        allowed="a finite number above 0",
        accepts=lambda value: _is_number(value) and value > 0,
    )


def count(name: str, default: int) -> Kwarg:
    return Kwarg(
        name=name,
        default=default,
        allowed="a whole number from 0",
        accepts=lambda value: _is_number(value) and value == int(value) and value >= 0,
    )


def whole(name: str, default: int, *, at_least: int, at_most: int) -> Kwarg:
    return Kwarg(
        name=name,
        default=default,
        allowed=f"a whole number from {at_least} to {at_most}",
        accepts=lambda value: (
            isinstance(value, int) and _is_number(value) and at_least <= value <= at_most
        ),
    )


def percent(name: str, default: float) -> Kwarg:
    return Kwarg(
        name=name,
        default=default,
        allowed="a number above 0 and up to 100",
        accepts=lambda value: _is_number(value) and 0 < value <= 100,
    )


def one_of(name: str, default: str, choices: tuple[str, ...]) -> Kwarg:
    return Kwarg(
        name=name,
        default=default,
        allowed=f"one of {', '.join(choices)}",
        accepts=lambda value: isinstance(value, str) and value in choices,
    )


def switch(name: str, default: bool) -> Kwarg:
    return Kwarg(
        name=name,
        default=default,
        allowed="true or false",
        accepts=lambda value: isinstance(value, bool),
    )


def expansion(default: float = 1.0) -> Kwarg:
    """Declare the factor that widens the observed range before it is searched."""
    return Kwarg(
        name="expand",
        default=default,
        allowed="a finite number from 1",
        accepts=lambda value: _is_number(value) and value >= 1,
    )


AVERAGING_CONSTANT = fraction("averaging_constant", 0.01, attribute="avg_constant")
