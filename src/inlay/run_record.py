"""The record of a run: its model and data, the time of each stage, and the check of its trace."""

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

__all__ = ["Agreement", "Record", "Stages", "model_name"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Record:
    """Facts about a run, for people and for reports.

    :param model: name of the model
    :param data: description of the data's source
    :param stages: names and seconds, in order
    :param advice: warnings about the data, with advice
    """

    model: str
    data: str
    samples: int = 0
    tokens: int = 0
    padding_tokens: int = 0
    stages: tuple[tuple[str, float], ...] = ()
    advice: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """Whether the traced graphs compute what the eager model does.

    :param unknown: why that is not known; empty if it was checked
    :param batch: description of the batch
    :param difference: norm of the difference of the outputs, relative to that of the eager ones
    :param tolerance: the difference that rounding may explain
    :param first: the first module whose outputs differ, if that was found
    """

    unknown: str = ""
    batch: str = ""
    difference: float = 0.0
    tolerance: float = 0.0
    first: str | None = None

    def __bool__(self) -> bool:
        return not self.unknown and self.difference <= self.tolerance

    def __str__(self) -> str:
        if self.unknown:
            return f"it was not checked that the traced model equals the eager one: {self.unknown}"
        first = "" if self.first is None else f", first in {self.first}"
        return (
            f"the traced model {'computes' if self else 'does not compute'} what the eager one "
            f"does: on {self.batch}, outputs differ by {self.difference:.2g} of their norm "
            f"(tolerance {self.tolerance:.2g}){first}"
        )


@dataclass
class Stages:
    """A clock for the stages of a run. Entering a stage again adds to its seconds."""

    seconds: dict[str, float] = field(default_factory=dict)
    announced: set[str] = field(default_factory=set)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self.announce(name)
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - start)

    def announce(self, name: str) -> None:
        """Log that a stage begins, the first time."""
        if name not in self.announced:
            self.announced.add(name)
            _log.info(name)

    def add(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def forget(self, *names: str) -> None:
        for name in names:
            self.seconds.pop(name, None)

    def as_tuple(self) -> tuple[tuple[str, float], ...]:
        return tuple(self.seconds.items())


def model_name(model: object) -> str:
    """Return the name of the folder that a model was loaded from, else the name of its class.

    Reports are passed on, so the rest of the path stays on the machine.
    """
    place = getattr(model, "name_or_path", None)
    if not isinstance(place, str) or not place:
        return type(model).__name__
    # Only "." and the like have to be looked up; the name of a linked folder is that of the link.
    return os.path.basename(os.path.abspath(place)) or type(model).__name__
