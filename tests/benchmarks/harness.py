"""Measure things side by side: on a shared machine only ratios from one run mean anything."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Measurement:
    """Seconds of one way of doing a thing, over all rounds."""

    seconds: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def interleave(
    ways: Mapping[str, Callable[[], Any]],
    rounds: int = 15,
    warm_up: int = 2,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Measurement]:
    """Run all ways in turn, round after round, so that they share whatever disturbs them.

    :param clock: `time.process_time` counts processor time, over all threads
    """
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(warm_up + rounds):
        for name, run in ways.items():
            start = clock()
            run()
            if turn >= warm_up:
                taken[name].append(clock() - start)
    return {name: Measurement(seconds) for name, seconds in taken.items()}


@dataclass(frozen=True)
class Ratio:
    """How long one way takes in units of another: the median over rounds, and the middle half."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"


def ratio(of: Measurement, to: Measurement) -> Ratio:
    """Round by round, since what disturbs a round disturbs both of its halves."""
    quotients = sorted(a / b for a, b in zip(of.seconds, to.seconds, strict=True))
    quartiles = statistics.quantiles(quotients, n=4)
    return Ratio(statistics.median(quotients), quartiles[0], quartiles[2])


def cold(file: str, *arguments: str) -> dict[str, float]:
    """Run a file in a process of its own with an empty compiler cache, and return what it prints.

    :param file: prints a dictionary in JSON as its last line
    """
    with tempfile.TemporaryDirectory() as cache:
        done = subprocess.run(
            [sys.executable, file, *arguments],
            env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)} failed:\n{done.stderr[-2000:]}")
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def single(value: float) -> Ratio:
    """A ratio that was measured once."""
    return Ratio(value, value, value)


@dataclass(frozen=True)
class Row:
    """A line of the table: what is divided by what, for which case, and the quotient."""

    group: str
    name: str
    ratio: Ratio
