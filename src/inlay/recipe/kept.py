"""Modules that presets leave in full precision: heads, and towers for images and sound."""

import re
from collections.abc import Collection
from typing import Any

from compressed_tensors.utils.match import match_name
from torch import nn

__all__ = ["kept_modules"]


def kept_modules(model: Any, targets: Collection[str]) -> list[str]:
    """Return what to ignore of a model by default: names of heads, and patterns of towers.

    :param targets: those of the recipe; what one of them names is not kept
    """
    heads = [name for name in _heads(model) if name not in targets]
    return [*heads, *(f"re:{re.escape(name)}($|[.].*)" for name in _towers(model, targets))]


def _heads(model: Any) -> list[str]:
    """Return the names of a model's output layers: over its vocabulary, or over its labels."""
    modules = dict(model.named_modules())
    if not hasattr(model, "get_output_embeddings"):
        return [name for name in modules if name.rpartition(".")[2] == "lm_head"]
    head = model.get_output_embeddings()
    if model.can_generate():
        return [name for name, module in modules.items() if module is head][:1]
    inside = set(map(id, model.base_model.modules()))
    labels = getattr(model.config, "num_labels", None)
    return [
        name
        for name, module in modules.items()
        if isinstance(module, nn.Linear)
        and id(module) not in inside
        and (module is head or module.out_features == labels)
    ]


def _towers(model: Any, targets: Collection[str]) -> list[str]:
    """Return the modules beside the decoder of a model that reads images or sound."""
    config = getattr(model, "config", None)
    parts = getattr(config, "sub_configs", None) or {}
    if not any(part in _OTHER_INPUTS and hasattr(config, part) for part in parts):
        return []
    decoder = model.get_decoder()
    if decoder is None or decoder is model:
        return []
    modules = dict(model.named_modules())
    above = {
        name
        for name, module in modules.items()
        if module is not decoder and decoder in module.modules()
    }
    head = model.get_output_embeddings()
    named = [target for target in targets if target not in _CLASSES]
    found = []
    for name, module in modules.items():
        if name in above or module in (head, decoder) or name.rpartition(".")[0] not in above:
            continue
        inside = [name, *(f"{name}.{own}" for own, _ in module.named_modules() if own)]
        if not any(match_name(each, target) for each in inside for target in named):
            found.append(name)
    return found


# The parts of a config that describe towers, and classes that targets may be.
_OTHER_INPUTS = ("vision_config", "audio_config", "vision_encoder_config", "speech_config")
_CLASSES = ("Linear", "Embedding")
