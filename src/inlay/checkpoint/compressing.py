"""Compressing the blocks of a model, by all processes where that pays."""

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from compressed_tensors.config import CompressionFormat

from inlay.checkpoint.layers import QuantizedLayer
from inlay.collectives import to_first_rank
from inlay.ranks.division import Part

__all__ = ["Block", "compressed_blocks", "pays_to_share"]

Tensors = dict[str, torch.Tensor]
Block = tuple[Tensors, list[QuantizedLayer]]  # tensors to write as they are, and quantized layers

# Packing these takes a hundred times as long as sending the result. For others sharing saves
# nothing: with two processes it took 1.2 times as long for int8, and 0.6 times for these.
_SLOW = (CompressionFormat.nvfp4_pack_quantized.value, CompressionFormat.mxfp4_pack_quantized.value)


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
