"""Compressing the blocks of a model, by all processes where that pays."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import QuantizationScheme

from inlay.checkpoint.layers import QuantizedLayer
from inlay.collectives import to_first_rank
from inlay.nodes.quantize import parts_by_rows
from inlay.ranks.division import Part

__all__ = ["Block", "compressed_blocks", "compressed_weight", "pays_to_share"]

Tensors = dict[str, torch.Tensor]
Block = tuple[Tensors, list[QuantizedLayer]]  # tensors to write as they are, and quantized layers

# Packing these takes a hundred times as long as sending the result. For others sharing saves
# nothing: with two processes it took 1.2 times as long for int8, and 0.6 times for these.
_SLOW = (CompressionFormat.nvfp4_pack_quantized.value, CompressionFormat.mxfp4_pack_quantized.value)
# What these make of some rows of a weight is what they make of these rows in the whole.
_BY_ROWS = (
    *_SLOW,
    CompressionFormat.mxfp8_quantized.value,
    CompressionFormat.pack_quantized.value,
    CompressionFormat.int_quantized.value,
    CompressionFormat.float_quantized.value,
    CompressionFormat.naive_quantized.value,
)


def compressed_weight(
    weight: torch.Tensor, state: Mapping[str, torch.Tensor], scheme: QuantizationScheme
) -> Tensors:
    """Compress a weight; return its tensors, and the others of its layer.

    :param state: the qparams of the layer, by their names in a checkpoint
    """
    compressor = BaseCompressor.get_value_from_registry(scheme.format)
    if scheme.weights is None or scheme.format not in _BY_ROWS:
        return dict(compressor.compress({"weight": weight, **state}, scheme))
    own = {name: tensor for name, tensor in state.items() if name.startswith("weight_")}
    parts: list[Tensors] = []
    for part, of_rows in parts_by_rows(weight, scheme.weights, own):
        parts.append(compressor.compress({**state, "weight": part, **of_rows}, scheme))
    if len(parts) == 1:
        return dict(parts[0])
    # The last part shows what all rows have in common.
    common = {name for name in state if of_rows.get(name, state[name]) is state[name]}
    found = {
        name: tensor if name in common else torch.cat([part[name] for part in parts])
        for name, tensor in parts[0].items()
    }
    if "weight_shape" in found:
        found["weight_shape"] = torch.tensor(weight.shape)
    return found


def pays_to_share(layers: Iterable[QuantizedLayer]) -> bool:
    """Whether it takes less time if each process compresses a part, and sends it to the first."""
    formats = (layer.scheme.format for layer in layers if layer.scheme is not None)
    return any(known in _SLOW for known in formats)


def compressed_blocks(
    blocks: Sequence[Block], compress: Callable[[QuantizedLayer], Tensors], *, shared: bool
) -> Iterator[tuple[Tensors, Tensors]]:
    """Yield the tensors of each block that stay as they are, and the compressed ones.

    One block after another, so that each can be freed once it is written. If the work is shared,
    all processes call it, as many blocks are in memory as there are processes, and the first
    process gets them all; the others get none.

    :param compress: returns the tensors that quantization of a layer adds to a checkpoint
    """
    part = Part.own() if shared else Part()
    for start in range(0, len(blocks), part.size):
        turn = blocks[start : start + part.size]
        own = turn[part.rank][1] if part.rank < len(turn) else []
        compressed = _merged(map(compress, own))
        of_ranks = [compressed] if part.size == 1 else to_first_rank(compressed)
        for (unquantized, _), quantized in zip(turn, of_ranks, strict=False):
            yield unquantized, quantized


def _merged(found: Iterable[Tensors]) -> Tensors:
    return {name: tensor for tensors in found for name, tensor in tensors.items()}
