"""Searching weights: the peer's eager observer over Inlay's, in one run."""

import time
from collections.abc import Iterator

import torch
from compressed_tensors.quantization import QuantizationArgs, preset_name_to_scheme
from harness import Row, interleave, ratio, single
from llmcompressor.observers import Observer as PeerObserver
from torch._inductor.utils import fresh_cache

from inlay.observers import Observer, flatten_for_calibration
from inlay.ranges.kernels import kernel_of
from inlay.ranges.search import COMPILE_FROM

SHAPE = (4096, 1024)
FORMATS = {"int4 in groups of 128": "W4A16", "int8 channel": "W8A8", "fp8 channel": "FP8_DYNAMIC"}
SLOW_FORMATS = {"nvfp4": "NVFP4A16", "mxfp4": "MXFP4A16"}  # for the peer: fewer rows, fewer rounds
SLOW_SHAPE = (COMPILE_FROM // 1024, 1024)


def rows(rounds: int = 5) -> Iterator[Row]:
    for name in ("memoryless_mse", "imatrix_mse"):
        for label, preset in {**FORMATS, **SLOW_FORMATS}.items():
            slow = label in SLOW_FORMATS
            shape = SLOW_SHAPE if slow else SHAPE
            args = preset_name_to_scheme(preset, ["Linear"]).weights
            yield _row(name, label, args, torch.randn(shape), 2 if slow else rounds)
            if label in FORMATS:
                yield _repaid(name, label, args)


def _repaid(name: str, label: str, args: QuantizationArgs) -> Row:
    """How many of the smallest weights that are compiled it takes to repay the compiler."""
    observer = Observer.load_from_registry(name, base_name="weight", args=args.model_copy())
    if name == "imatrix_mse":
        observer._imatrix_sum, observer._imatrix_count = torch.ones(1024), torch.tensor(1)
    search, weight = observer.search, torch.randn(COMPILE_FROM // 1024, 1024)
    observed = flatten_for_calibration(weight, "weight", observer.args)
    torch._dynamo.reset()
    kernel_of.cache_clear()
    with fresh_cache():
        start = time.perf_counter()
        search(observed)
        compiling = time.perf_counter() - start
        taken = interleave(
            {"kernel": lambda: search(observed), "plain": lambda: search.specification(observed)},
            5,
        )
    saved = taken["plain"].median - taken["kernel"].median
    group = f"compiling a search / saved per weight of {COMPILE_FROM // 1024}x1024"
    return Row(group, f"{name}, {label}", single(compiling / saved))


def _row(name: str, label: str, args: QuantizationArgs, weight: torch.Tensor, rounds: int) -> Row:
    importance = torch.rand(weight.shape[1]) + 0.1

    def search(base: type) -> None:
        observer = base.load_from_registry(name, base_name="weight", args=args.model_copy())
        if name == "imatrix_mse":
            observer._imatrix_sum, observer._imatrix_count = importance, torch.tensor(1)
        observer(weight)

    taken = interleave(
        {"inlay": lambda: search(Observer), "peer": lambda: search(PeerObserver)}, rounds, 1
    )
    return Row(
        "peer's weight search / Inlay's", f"{name}, {label}", ratio(taken["peer"], taken["inlay"])
    )
