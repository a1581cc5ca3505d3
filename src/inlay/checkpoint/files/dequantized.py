"""The files of a model that is published in few bits, read as if it were not."""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from inlay.checkpoint.files.compressed import QPARAMS, compressed
from inlay.checkpoint.files.packed import block_scaled, mxfp4
from inlay.checkpoint.files.weight_files import StoredTensor, WeightFiles
from inlay.errors import ConfigurationError

__all__ = ["READABLE", "DequantizedFiles", "is_readable", "open_files"]

# What `quantization_config` calls the formats that are read.
READABLE = ("fp8", "mxfp4", "compressed-tensors")
# Scales of FP8 models for activations.
_OF_ACTIVATIONS = ("activation_scale", "input_scale")


def open_files(folder: Path) -> WeightFiles:
    """Find the files of a model; read no more than their headers.

    :param folder: a folder whose weights are in full precision, or in a format that is read
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    quantization = config.get("quantization_config")
    if quantization is None:
        return WeightFiles(folder)
    name = config.get("dtype", config.get("torch_dtype")) or "bfloat16"
    return DequantizedFiles(folder, quantization, getattr(torch, name))


def is_readable(quantization: Any) -> bool:
    """Return whether weights with a `quantization_config` can be dequantized."""
    method = (
        quantization.get("quant_method")
        if isinstance(quantization, Mapping)
        else getattr(quantization, "quant_method", None)
    )
    return getattr(method, "value", method) in READABLE


class DequantizedFiles(WeightFiles):
    """Files with weights in few bits. `tensors` and `reading` give the weights dequantized.

    :param quantization: the `quantization_config` of the model
    :param dtype: of the dequantized weights
    """

    def __init__(self, folder: Path, quantization: Mapping[str, Any], dtype: torch.dtype) -> None:
        super().__init__(folder)
        self._dtype = dtype
        method = quantization.get("quant_method")
        if method not in READABLE:
            raise ConfigurationError(
                f"{folder} is quantized by {method}, and weights are read from "
                f"{', '.join(READABLE)}; calibrate the model it was made from"
            )
        with super().reading() as read:
            found = {
                "fp8": lambda: block_scaled(quantization, self.stored),
                "mxfp4": lambda: mxfp4(quantization, self.stored),
                "compressed-tensors": lambda: compressed(quantization, self.stored, read),
            }[str(method)]()
            self._packed = {each.name: each for each in found}
        hidden = {name for each in self._packed.values() for name in each.parts.values()}
        hidden |= {name for name in self.stored if _is_of_quantization(name, str(method))}
        plain = {name: each for name, each in self.stored.items() if name not in hidden}
        self.tensors = {**plain, **{name: self._described(name) for name in self._packed}}

    @contextlib.contextmanager
    def reading(self) -> Iterator[Callable[[str], torch.Tensor]]:
        with super().reading() as stored:

            def read(name: str) -> torch.Tensor:
                packed = self._packed.get(name)
                if packed is None:
                    return stored(name)
                parts = {part: stored(own) for part, own in packed.parts.items()}
                return packed.unpack(parts, self._dtype)

            yield read

    def is_mapped(self, name: str) -> bool:
        return name not in self._packed

    def _described(self, name: str) -> StoredTensor:
        packed = self._packed[name]
        file = self.stored[next(iter(packed.parts.values()))].file
        return StoredTensor(file=file, shape=packed.shape, dtype=self._dtype)


def _is_of_quantization(name: str, method: str) -> bool:
    """Return whether a tensor serves quantized weights or values only."""
    last = name.rpartition(".")[2]
    return last in (QPARAMS if method == "compressed-tensors" else _OF_ACTIVATIONS)
