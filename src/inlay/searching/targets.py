"""Targets of a search, and the choice that meets one."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from inlay.checkpoint.shards import size_in_bytes
from inlay.errors import ConfigurationError
from inlay.options import SearchOptions
from inlay.report.numbers import size as size_in_words
from inlay.searching.scores import Scores
from inlay.searching.solving import Choice, frontier, solve

__all__ = ["Target", "choose", "corrected", "points_of", "smallest_within"]

Kind = Literal["bits", "size", "max_kl"]


@dataclass(frozen=True)
class Target:
    """What a search is to reach: mean bits of a weight, bytes of a checkpoint, or a KL divergence.

    :param value: bits without scales, bytes, or nats per position
    """

    kind: Kind
    value: float

    @classmethod
    def of(cls, options: SearchOptions) -> "Target":
        """Return the target. Exactly one of the arguments is set."""
        kinds: tuple[Kind, ...] = ("bits", "size", "max_kl")
        (kind,) = (each for each in kinds if getattr(options, each) is not None)
        value = getattr(options, kind)
        number = size_in_bytes(value) if kind == "size" else float(value)
        if not math.isfinite(number) or number <= 0:
            raise ConfigurationError(f"{kind} must be a positive number, not {value!r}")
        return cls(kind, number)

    def __str__(self) -> str:
        if self.kind == "size":
            return f"a size of {size_in_words(round(self.value))}"
        if self.kind == "bits":
            return f"{self.value:g} bits per weight"
        return f"a KL divergence of at most {self.value:g}"


def choose(scores: Scores, target: Target) -> Choice:
    """Return the choice of least predicted loss within a target of bits or size.

    :raises ConfigurationError: if no choice is within it
    """
    is_size = target.kind == "size"
    items = [unit.by_size() if is_size else unit.by_bits() for unit in scores.units]
    budget = target.value - scores.kept if is_size else target.value * scores.count
    # A decimal such as 4.1 has no exact binary form, and its budget may end just below a whole.
    found = solve(items, math.floor(budget * (1 + 1e-12) + 1e-6))
    if found is None:
        least = frontier(items)[0]
        needed = (
            size_in_words(scores.size_of(least)) if is_size else f"{scores.bits_of(least):.4g} bits"
        )
        raise ConfigurationError(
            f"{target} cannot be reached: the smallest formats take {needed}. Raise the target, or "
            "add a format of fewer bits (--formats)"
        )
    return found


def points_of(scores: Scores) -> list[Choice]:
    """Return the choices on the frontier of size and predicted loss, from the smallest on."""
    return frontier([unit.by_size() for unit in scores.units])


def corrected(scores: Scores, predicted: float) -> float:
    """Return what a predicted loss comes to, by the choices that were measured.

    Predictions add up the losses of layers, as if none changed that of another. Between measured
    choices, the ratio of measured to predicted loss is interpolated.
    """
    known = sorted((check.predicted, check.kl.value) for check in scores.checks)
    known = [pair for pair in known if min(pair) > 0]
    if not known or predicted <= 0:
        return predicted
    below = max((pair for pair in known if pair[0] <= predicted), default=known[0])
    above = min((pair for pair in known if pair[0] >= predicted), default=known[-1])
    ratios = [math.log(kl / cost) for cost, kl in (below, above)]
    part = 0.0
    if above[0] > below[0]:
        part = math.log(predicted / below[0]) / math.log(above[0] / below[0])
    return predicted * math.exp(ratios[0] + part * (ratios[1] - ratios[0]))


def smallest_within(scores: Scores, points: Sequence[Choice], max_kl: float) -> int:
    """Return the place of the smallest choice on the frontier predicted to be within a KL."""
    for place, choice in enumerate(points):
        check = scores.check_of(choice)
        kl = corrected(scores, scores.predicted(choice)) if check is None else check.kl.value
        if kl <= max_kl:
            return place
    return len(points) - 1
