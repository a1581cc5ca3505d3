"""What a calibration was run with, and how it went."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

__all__ = ["Record", "Stages"]


@dataclass(frozen=True, kw_only=True)
class Record:
    """A run, for people and for reports.

    :param model: name or path of the model
    :param data: where the data came from
    :param stages: names and seconds, in order
    """

    model: str
    data: str
    samples: int = 0
    tokens: int = 0
    padding_tokens: int = 0
    stages: tuple[tuple[str, float], ...] = ()


@dataclass
class Stages:
    """Seconds that the parts of a run take. A stage that is entered again goes on."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - start)

    def add(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def as_tuple(self) -> tuple[tuple[str, float], ...]:
        return tuple(self.seconds.items())
