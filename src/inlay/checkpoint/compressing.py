"""Compressing weights some rows at a time."""

from collections.abc import Mapping

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme

from inlay.formats.storage import storage_of
from inlay.nodes.quantize import parts_by_rows

__all__ = ["compressed_weight"]

Tensors = dict[str, torch.Tensor]


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
    # The last part has the values that all rows share.
    common = {name for name in state if of_rows.get(name, state[name]) is state[name]}
    found = {
        name: tensor if name in common else torch.cat([part[name] for part in parts])
        for name, tensor in parts[0].items()
    }
    if "weight_shape" in found:
        found["weight_shape"] = torch.tensor(weight.shape)
    return found
