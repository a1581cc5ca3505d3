"""Weights stored in few bits: the formats of published models, and how to unpack them."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from inlay.checkpoint.files.weight_files import StoredTensor
from inlay.errors import CheckpointError

__all__ = ["Packed", "Parts", "Stored", "block_scaled", "mxfp4"]

# The tensors of all files, by name.
Stored = Mapping[str, StoredTensor]
Parts = Mapping[str, torch.Tensor]

# The values of four bits: a sign, two bits of exponent, one of mantissa.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_ROWS = 1024  # how many are unpacked at once, to bound the memory of intermediate values


@dataclass(frozen=True, kw_only=True)
class Packed:
    """A weight that is stored as several tensors.

    :param name: the name of the weight
    :param parts: the names of these tensors, by what they hold
    :param unpack: computes the weight from its parts, in a dtype
    """

    name: str
    parts: Mapping[str, str]
    shape: tuple[int, ...]
    unpack: Callable[[Parts, torch.dtype], torch.Tensor]


def block_scaled(quantization: Mapping[str, Any], stored: Stored) -> Iterator[Packed]:
    """Find FP8 weights with a scale for each block, as DeepSeek and Qwen publish them."""
    block = quantization.get("weight_block_size")
    for name, scales in stored.items():
        weight = name.removesuffix("_scale_inv")
        if weight == name or weight not in stored:
            continue
        shape = stored[weight].shape
        if stored[weight].dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
            raise CheckpointError(
                f"{weight} is stored as {stored[weight].dtype} with scales, and only FP8 is read "
                "like this; take the model that it was made from"
            )
        yield Packed(
            name=weight,
            parts={"weight": weight, "scale": name},
            shape=shape,
            unpack=_Blocks(_block_of(block, shape, scales.shape, weight)),
        )


@dataclass(frozen=True)
class _Blocks:
    """Multiplies each block of rows and columns by its scale.

    :param size: rows and columns of a block
    """

    size: tuple[int, int]

    def __call__(self, parts: Parts, dtype: torch.dtype) -> torch.Tensor:
        weight, scale = parts["weight"], _as_numbers(parts["scale"])
        rows, columns = self.size
        whole = torch.empty(weight.shape, dtype=dtype)
        grid = (-(-weight.shape[-2] // rows), -(-weight.shape[-1] // columns))
        scale = scale.reshape(-1, *grid)
        matrices = weight.reshape(-1, *weight.shape[-2:])
        flat = whole.view(matrices.shape)
        step = max(1, _ROWS // rows)
        for result, matrix, scales in zip(flat, matrices, scale, strict=True):
            for at in range(0, scales.shape[0], step):
                some = slice(at * rows, (at + step) * rows)
                fine = scales[at : at + step].repeat_interleave(rows, 0)[: len(matrix[some])]
                fine = fine.repeat_interleave(columns, 1)[:, : matrix.shape[1]]
                result[some] = matrix[some].to(torch.float32) * fine
        return whole


def _block_of(
    block: Any, shape: tuple[int, ...], scales: tuple[int, ...], name: str
) -> tuple[int, int]:
    """Return the size of a block; that of the matrix if there is one scale.

    :raises CheckpointError: if the scales do not fit the weight
    """
    rows, columns = shape[-2:]
    is_single = all(size == 1 for size in scales[-2:])
    size = (rows, columns) if is_single or not block else (int(block[0]), int(block[1]))
    expected = (*shape[:-2], -(-rows // size[0]), -(-columns // size[1]))
    if not is_single and scales != expected:
        raise CheckpointError(
            f"{name} has the shape {shape} and scales of {scales}, where blocks of {size} need "
            f"{expected}; copy or download the model again"
        )
    return size


def mxfp4(quantization: Mapping[str, Any], stored: Stored) -> Iterator[Packed]:
    """Find MXFP4 weights as gpt-oss has them: blocks of 32 values with a shared exponent."""
    for name, blocks in stored.items():
        weight = name.removesuffix("_blocks")
        if weight == name or f"{weight}_scales" not in stored:
            continue
        *experts, rows, groups, size = blocks.shape
        yield Packed(
            name=weight,
            parts={"blocks": name, "scales": f"{weight}_scales"},
            shape=(*experts, 2 * groups * size, rows),  # the model has inputs first
            unpack=_unpack_mxfp4,
        )


def _unpack_mxfp4(parts: Parts, dtype: torch.dtype) -> torch.Tensor:
    blocks, scales = parts["blocks"], parts["scales"]
    experts, rows, groups, size = blocks.shape
    whole = torch.empty(experts, 2 * groups * size, rows, dtype=dtype)
    values = torch.tensor(_E2M1)
    for result, packed, exponents in zip(whole, blocks, scales, strict=True):
        for at in range(0, rows, _ROWS):
            some = packed[at : at + _ROWS]
            pairs = torch.stack([some & 0xF, some >> 4], dim=-1).flatten(-2)
            found = values[pairs.int()] * _as_numbers(exponents[at : at + _ROWS])[..., None]
            result[:, at : at + _ROWS] = found.flatten(-2).t()
    return whole


def _as_numbers(scales: torch.Tensor) -> torch.Tensor:
    """Return scales as float32. Bytes are exponents of two, with a bias of 127."""
    if scales.dtype == torch.uint8:
        return torch.ldexp(torch.ones(scales.shape), scales.int() - 127)
    return scales.to(torch.float32)
