"""Compile time over depth: observers and one body per block, over the plain whole graph."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from harness import Row, single
from overhead import batch, model, recipe
from torch._inductor.utils import fresh_cache

from inlay import Calibration

DEPTHS = [4, 12, 32]


def rows() -> Iterator[Row]:
    one = batch(256)
    for depth in DEPTHS:
        llama = model(256, depth, 64)
        plain = _cold(lambda llama=llama: torch.compile(llama)(**one))
        calibration = Calibration(llama, recipe("static_minmax"))
        own = _cold(lambda c=calibration: c.observe(**one))
        yield Row(
            "first observe() / first plain compiled call", f"{depth} blocks", single(own / plain)
        )


def _cold(run: Callable[[], Any]) -> float:
    torch._dynamo.reset()
    with fresh_cache(), torch.no_grad():
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
