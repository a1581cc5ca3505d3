"""The first batch of deep models: what tracing costs when every block is the same."""

import statistics
import time
from collections.abc import Iterator

import torch
from harness import Row, single
from overhead import batch, model, recipe

from inlay import Calibration

SHALLOW, DEEPER = 6, [12, 48]
ROUNDS = 3


def rows() -> Iterator[Row]:
    """Seconds of the first `observe()` beyond those of the next ones, over those of 6 blocks."""
    _beyond_the_forward(SHALLOW)  # imports Dynamo
    taken = {
        depth: statistics.median(_beyond_the_forward(depth) for _ in range(ROUNDS))
        for depth in (SHALLOW, *DEEPER)
    }
    for depth in DEEPER:
        yield Row(
            f"first observe() beyond the forward / that with {SHALLOW} blocks",
            f"{depth} blocks",
            single(taken[depth] / taken[SHALLOW]),
        )


def _beyond_the_forward(depth: int) -> float:
    torch._dynamo.reset()
    one, calibration = batch(256), Calibration(model(256, depth, 64), recipe("static_minmax"))
    seconds = []
    for _ in range(4):
        start = time.perf_counter()
        calibration.observe(**one)
        seconds.append(time.perf_counter() - start)
    return seconds[0] - min(seconds[1:])
