"""The quantized layers of a model, and the config that describes them to a loader."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from compressed_tensors.compressors.format import infer_module_format
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import (
    QuantizationConfig,
    QuantizationScheme,
    QuantizationStatus,
)
from compressed_tensors.quantization.quant_config import get_vllm_module_type
from compressed_tensors.utils.match import match_targets
from torch import nn

from inlay.model import StackedLinear, Weight, modules_with_stacks
from inlay.observers import default_observer
from inlay.recipe import Plan, Recipe, Slot
from inlay.transformers_private import saved_name

__all__ = [
    "QuantizedLayer",
    "quantization_config",
    "quantized_layers",
]

_LAYERS = (nn.Linear, nn.Embedding)
_BASE_NAMES = {"weights": "weight", "input_activations": "input", "output_activations": "output"}


@dataclass(frozen=True, kw_only=True)
class QuantizedLayer:
    """A quantized module with its slots and its scheme in the config."""

    name: str
    kind: type[nn.Module]
    weight: Weight | None  # None for attention
    slots: tuple[Slot, ...]
    scheme: QuantizationScheme | None  # None if only keys and values are quantized
    dtype: torch.dtype  # in which the layer computes and stores its scales


def quantized_layers(
    model: nn.Module, plan: Plan, full_precision: frozenset[str] = frozenset()
) -> list[QuantizedLayer]:
    """List the layers of a plan, except the modules that stay in full precision."""
    slots: dict[str, list[Slot]] = {}
    for slot in plan.slots.values():
        slots.setdefault(slot.module, []).append(slot)
    layers = []
    for name, own in slots.items():
        if name in full_precision:
            continue
        weight, scheme = plan.weights.get(name), plan.schemes.get(name)
        holder = model.get_submodule(weight.parameter.rpartition(".")[0] if weight else name)
        kind = StackedLinear if plan.is_routed(name) else type(holder)
        layers.append(
            QuantizedLayer(
                name=name,
                kind=kind,
                weight=weight,
                slots=tuple(own),
                scheme=None if scheme is None else _as_served(name, kind, scheme),
                dtype=next(holder.parameters()).dtype,
            )
        )
    return layers


def quantization_config(
    model: nn.Module, recipe: Recipe, layers: Sequence[QuantizedLayer]
) -> QuantizationConfig:
    """Make the config of a checkpoint, with everything that a loader has to know."""
    schemes: list[QuantizationScheme] = []
    for layer in layers:
        if layer.scheme is not None and layer.scheme not in schemes:
            schemes.append(layer.scheme)
    # Attention that is quantized has a quantized cache: a loader looks for its scheme here.
    attention = (layer.scheme for layer in layers if layer.weight is None and layer.scheme)
    cache = recipe.config.kv_cache_scheme or next((s.input_activations for s in attention), None)
    return QuantizationConfig(
        config_groups={f"group_{index}": scheme for index, scheme in enumerate(schemes)},
        kv_cache_scheme=cache,
        format=_common_format(schemes),
        quantization_status=QuantizationStatus.COMPRESSED,
        ignore=_ignored(model, layers),
    )


def _as_served(name: str, kind: type[nn.Module], scheme: QuantizationScheme) -> QuantizationScheme:
    """Return a copy of the scheme that names its format and the observers used."""
    served: QuantizationScheme = scheme.model_copy(deep=True)
    for part, base_name in _BASE_NAMES.items():
        args = getattr(served, part)
        if args is not None and args.dynamic is not True:
            args.observer = args.observer or default_observer(base_name)
    # Compressors know only the plain classes, but compress subclasses just as well.
    plain = nn.Linear if issubclass(kind, _LAYERS) else kind
    served.format = CompressionFormat(served.format or infer_module_format(plain, served)).value
    if issubclass(kind, nn.Embedding) and served.input_activations is not None:
        # Embedding inputs are indices: a separate scheme keeps loaders from quantizing them.
        served.targets, served.input_activations = [name], None
    return served


def _common_format(schemes: Iterable[QuantizationScheme]) -> str:
    formats = {str(scheme.format) for scheme in schemes} - {CompressionFormat.dense.value}
    if len(formats) > 1:
        return str(CompressionFormat.mixed_precision.value)
    return formats.pop() if formats else str(CompressionFormat.dense.value)


def _ignored(model: nn.Module, layers: Sequence[QuantizedLayer]) -> list[str]:
    """List every module that a target could match and that is not quantized.

    vLLM needs the names in the checkpoint, transformers those in the model; both are listed.
    """
    quantized = {layer.name: layer for layer in layers if layer.scheme is not None}
    kinds = {get_vllm_module_type(layer.kind.__name__) for layer in quantized.values()}
    targets = {t for layer in quantized.values() if layer.scheme for t in layer.scheme.targets}
    ignored: list[str] = []
    for name, module in model.named_modules() if quantized else ():
        is_meant = get_vllm_module_type(type(module).__name__) in kinds or (
            isinstance(module, _LAYERS) and match_targets(name, module, targets)
        )
        if is_meant and name not in quantized:
            ignored += [saved_name(model, name), name]
    views = (layer.weight for layer in quantized.values())
    holders = {view.parameter.rpartition(".")[0] for view in views if view is not None}
    for name, _ in modules_with_stacks(model) if quantized else ():
        if name in holders:
            continue
        # A loader that splits a stack makes a Linear of each matrix.
        ignored += [f"re:{re.escape(n)}[.].*" for n in (saved_name(model, name), name)]
    return list(dict.fromkeys(ignored))
