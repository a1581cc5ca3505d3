"""Searching weights: the peer's eager observer over Inlay's, in one run."""

from collections.abc import Iterator

import torch
from compressed_tensors.quantization import QuantizationArgs, preset_name_to_scheme
from harness import Row, interleave, ratio
from llmcompressor.observers import Observer as PeerObserver

from inlay.observers import Observer

SHAPE = (4096, 1024)
FORMATS = {"int4 in groups of 128": "W4A16", "int8 channel": "W8A8", "fp8 channel": "FP8_DYNAMIC"}
SLOW_FORMATS = {"nvfp4": "NVFP4A16", "mxfp4": "MXFP4A16"}  # for the peer: fewer rows, fewer rounds


def rows(rounds: int = 5) -> Iterator[Row]:
    for name in ("memoryless_mse", "imatrix_mse"):
        for label, preset in {**FORMATS, **SLOW_FORMATS}.items():
            slow = label in SLOW_FORMATS
            shape = (SHAPE[0] // 4, SHAPE[1]) if slow else SHAPE
            args = preset_name_to_scheme(preset, ["Linear"]).weights
            yield _row(name, label, args, torch.randn(shape), 2 if slow else rounds)


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
