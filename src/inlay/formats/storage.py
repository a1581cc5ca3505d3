"""How compressed-tensors stores each format in a checkpoint, and how transformers loads it."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy

from inlay.errors import ConfigurationError
from inlay.formats.numbers import name_of

__all__ = ["Storage", "columns_problem", "dtype_to_load", "require_storable", "storage_of"]


@dataclass(frozen=True, kw_only=True)
class Storage:
    """How one compression format treats weights.

    :param by_rows: whether some rows of a weight compress to these rows of the compressed weight
    :param loads_as: the dtype that transformers decompresses to, whatever dtype it is asked for;
        None if it follows the model
    :param plain_stacks: whether transformers accepts experts in full precision beside it
    """

    by_rows: bool = True
    loads_as: torch.dtype | None = None
    plain_stacks: bool = False


_STORAGE: dict[str, Storage] = {
    CompressionFormat.nvfp4_pack_quantized.value: Storage(loads_as=torch.bfloat16),
    CompressionFormat.mxfp4_pack_quantized.value: Storage(loads_as=torch.bfloat16),
    "mxfp6-pack-quantized": Storage(loads_as=torch.bfloat16),  # compressed-tensors 0.20
    CompressionFormat.mxfp8_quantized.value: Storage(loads_as=torch.bfloat16),
    CompressionFormat.pack_quantized.value: Storage(),
    CompressionFormat.int_quantized.value: Storage(),
    CompressionFormat.float_quantized.value: Storage(plain_stacks=True),
    CompressionFormat.naive_quantized.value: Storage(),
}


def storage_of(format_name: str | None) -> Storage:
    """Look up a compression format by name; one that is not listed is compressed as a whole."""
    return _STORAGE.get(str(format_name), Storage(by_rows=False))


def dtype_to_load(format_names: Iterable[str | None]) -> torch.dtype | None:
    """Return the only dtype in which transformers runs these formats; None if any works."""
    dtypes = (storage_of(name).loads_as for name in format_names)
    return next((dtype for dtype in dtypes if dtype is not None), None)


def require_storable(weights: QuantizationArgs) -> None:
    """Refuse weights that no compressor stores as they were calibrated.

    compressed-tensors packs FP4 and FP6 weights in few layouts. It takes any groups of 16 or 32
    for them, drops what these layouts cannot hold, and fails on others once it writes.

    :raises ConfigurationError: if FP4 weights are neither NVFP4 nor MXFP4, or FP6 ones not MXFP6
    """
    layouts = _LAYOUTS.get(name_of(weights), {})
    layout = weights.strategy, weights.group_size, weights.scale_dtype
    if layouts and layout not in layouts:
        strategy = getattr(weights.strategy, "value", weights.strategy)
        group = "" if weights.group_size is None else f" of {weights.group_size}"
        raise ConfigurationError(
            f"weights in {name_of(weights)} with strategy {strategy}{group} and scales in "
            f"{weights.scale_dtype or 'the dtype of the model'} cannot be stored; use the preset "
            + " or ".join(layouts.values())
        )


def columns_problem(columns: int, args: QuantizationArgs) -> str | None:
    """Describe why groups or blocks do not divide the columns of a value; None if they do.

    Blocks may be cut off at the last row. No loader runs a weight whose last column of blocks is.
    """
    if args.strategy == QuantizationStrategy.BLOCK:
        size = args.block_structure[1]
        what = f"blocks of {size} columns"
    else:
        size = args.group_size
        what = f"groups of {size}"
    return f"{columns} columns cannot be divided into {what}" if size and columns % size else None


_NV = (QuantizationStrategy.TENSOR_GROUP, 16, torch.float8_e4m3fn)
_MX = (QuantizationStrategy.GROUP, 32, torch.uint8)
_LAYOUTS = {
    "float4": {
        _NV: "NVFP4A16 (tensor_group of 16, scales in float8_e4m3fn)",
        _MX: "MXFP4A16 (group of 32, scales in uint8)",
    },
    "float6": {_MX: "MXFP6A16 (group of 32, scales in uint8)"},
}
