"""Weights that compressed-tensors compressed, in any of its formats."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from compressed_tensors.utils.match import match_targets
from torch import nn

from inlay.checkpoint.files.packed import Packed, Parts, Stored
from inlay.errors import CheckpointError
from inlay.recipe.presets import checked

__all__ = ["QPARAMS", "compressed"]

_KEYS = ("scale", "zero_point", "global_scale", "g_idx")
# The names of what a layer has beside its weight, bias and packed weight.
QPARAMS = frozenset(
    ["weight_shape"]
    + [f"{value}_{key}" for value in ("weight", "input", "output", "q", "k", "v") for key in _KEYS]
)
_DENSE = CompressionFormat.dense.value


def compressed(
    quantization: Mapping[str, Any], stored: Stored, read: Callable[[str], torch.Tensor]
) -> Iterator[Packed]:
    """Find the weights of a checkpoint of compressed-tensors.

    :param read: reads a stored tensor; some have their shape in one
    """
    known = {name: value for name, value in quantization.items() if name in _FIELDS}
    config = checked(QuantizationConfig, **known)
    layers: dict[str, dict[str, str]] = {}
    for name in stored:
        module, _, part = name.rpartition(".")
        if part in QPARAMS or part in ("weight", "weight_packed"):
            layers.setdefault(module, {})[part] = name
    for module, parts in layers.items():
        main = parts.get("weight_packed", parts.get("weight"))
        if main is None or "weight_scale" not in parts:
            continue  # keys and values, or a weight that is not quantized
        scheme = _scheme_of(module, config)
        if (scheme.format or config.format) == _DENSE:
            continue  # its values lie on the grid already
        shape = stored[main].shape
        if "weight_shape" in parts:
            shape = tuple(read(parts["weight_shape"]).tolist())
        elif main == parts.get("weight_packed"):
            shape = (shape[0], 2 * shape[1])  # two values in a byte
        yield Packed(
            name=f"{module}.weight",
            parts=parts,
            shape=shape,
            unpack=partial(_decompressed, scheme.format or config.format, scheme),
        )


_FIELDS = set(QuantizationConfig.model_fields)


def _decompressed(
    format: str, scheme: QuantizationScheme, parts: Parts, dtype: torch.dtype
) -> torch.Tensor:
    compressor = BaseCompressor.get_value_from_registry(format)
    weight: torch.Tensor = compressor.decompress(dict(parts), scheme)["weight"]
    return weight.detach().to(dtype)


def _scheme_of(module: str, config: QuantizationConfig) -> QuantizationScheme:
    """Return the scheme of a module. A target that names it goes before its class."""
    linear = nn.Linear(1, 1, device="meta")
    groups = config.config_groups.values()
    for is_named in (True, False):
        for scheme in groups:
            targets = [t for t in scheme.targets if (t not in _CLASSES) == is_named]
            if match_targets(module, linear, targets):
                assert isinstance(scheme, QuantizationScheme)
                return scheme
    raise CheckpointError(
        f"{module} has scales, and no group of quantization_config targets it; correct config.json"
    )


_CLASSES = ("Linear", "Embedding")
