"""Several processes with one thread each, joined by gloo, over one.

In memory the clock stops when the qparams are there. Streamed, it runs from folder to folder.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Scheme, observer of inputs or weights, batches, tokens in each.
CASES = [
    ("W8A8_STATIC", "static_minmax", 32, 256),
    ("W8A8_STATIC", "histogram", 32, 256),
    ("NVFP4A16", "memoryless_mse", 0, 0),
]
STREAMED_CASES = [
    ("W8A8_STATIC", "static_minmax", 32, 256),
    ("NVFP4A16", "memoryless_minmax", 0, 0),
]
ROUNDS = 3
PROCESSES = (1, 2)


def rows() -> Iterator[Any]:
    """Seconds of one process over those of two, and how many collectives there were."""
    from smollm2 import smollm2

    folder = smollm2()
    for case in CASES:
        yield from _compared("to qparams", folder, case)
    for case in STREAMED_CASES:
        yield from _compared("streamed", folder, case)


def _compared(way: str, folder: str, case: tuple[Any, ...]) -> Iterator[Any]:
    from harness import Measurement, Row, ratio, single

    taken = [[measure(count, way, folder, case) for count in PROCESSES] for _ in range(ROUNDS)]
    one, two = (Measurement([r[side]["seconds"] for r in taken]) for side in (0, 1))
    scheme, observer, batches, _ = case
    label = f"SmolLM2-135M, {scheme} {observer}, {batches or 'no'} batches, one thread each"
    yield Row(f"one process / two, {way}", label, ratio(one, two))
    counts = taken[0][1]["collectives"], taken[0][1]["megabytes"]
    yield Row(f"collectives of two processes, {way}", label, single(counts[0]))
    yield Row(f"megabytes that a process sends in them, {way}", label, single(counts[1]))


def measure(processes: int, way: str, folder: str, case: tuple[Any, ...]) -> dict[str, float]:
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    with tempfile.TemporaryDirectory() as place:
        done = subprocess.run(
            [*start, str(processes), __file__, way, place, folder, *map(str, case)],
            env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main(
    way: str, place: str, folder: str, scheme: str, observer: str, batches: str, tokens: str
) -> None:
    import torch
    from torch import distributed as dist

    import inlay
    from inlay.checkpoint.loading import load_model

    dist.init_process_group("gloo")
    is_streamed = way == "streamed"
    model = folder if is_streamed else load_model(folder, dtype="float32")
    part = "inputs" if int(batches) else "weights"
    recipe = inlay.Recipe.from_preset(scheme, ignore=["lm_head"], **{part: {"observer": observer}})
    torch.manual_seed(0)
    data = [
        {"input_ids": row.tolist()} for row in torch.randint(0, 49152, (int(batches), int(tokens)))
    ]
    options = {"held_out": 0, "compiler": "eager", "progress": False}
    counted = _count(dist)
    dist.barrier()
    start = time.perf_counter()
    if is_streamed:
        run: Any = inlay.stream(model, recipe, data or None, out=Path(place) / "out", **options)
    else:
        run = inlay.calibrate(model, recipe, data or None, **options)
    seconds = time.perf_counter() - start
    if dist.get_rank() == 0:
        print(json.dumps({"seconds": seconds, **counted, **dict(run.record.stages)}))
    dist.destroy_process_group()


def _count(dist: Any) -> dict[str, float]:
    """Count collectives from now on, and what a process puts into them."""
    counted = {"collectives": 0, "megabytes": 0.0}

    def counting(name: str) -> None:
        original = getattr(dist.distributed_c10d, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            tensor = args[-1] if name == "all_gather" else args[0]
            counted["collectives"] += 1
            counted["megabytes"] += tensor.nbytes / 1e6
            return original(*args, **kwargs)

        setattr(dist.distributed_c10d, name, call)
        setattr(dist, name, call)

    for name in ("all_reduce", "all_gather", "gather"):
        counting(name)
    return counted


if __name__ == "__main__":
    main(*sys.argv[1:])
