"""Compressing the blocks of a model, by all processes where that pays."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme

from inlay.checkpoint.layers import QuantizedLayer
from inlay.collectives import to_first_rank
from inlay.formats.storage import storage_of
from inlay.nodes.quantize import parts_by_rows
from inlay.ranks.division import Part

__all__ = ["Block", "compressed_blocks", "compressed_weight", "pays_to_share"]

Tensors = dict[str, torch.Tensor]
Block = tuple[Tensors, list[QuantizedLayer]]  # tensors to write as they are, and quantized layers


def compressed_weight(
    weight: torch.Tensor, state: Mapping[str, torch.Tensor], scheme: QuantizationScheme
) -> Tensors:
    """Compress a weight; return its tensors, and the others of its layer.

    :param state: the qparams of the layer, by their names in a checkpoint
    """
    compressor = BaseCompressor.get_value_from_registry(scheme.format)
    if scheme.weights is None or not storage_of(scheme.format).by_rows:
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
    """Whether sharing saves time: each process compresses a part, and sends it to rank 0."""
    formats = (layer.scheme.format for layer in layers if layer.scheme is not None)
    return any(storage_of(each).is_slow for each in formats)


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
