"""Language models in folders, and faults of the kind that `inlay compare` is to find."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from families import llama
from safetensors.torch import load_file, save_file
from tokens import CHAT, text_of, word_tokenizer
from torch import nn

from inlay import Calibration, Recipe

__all__ = [
    "TEXTS",
    "changed_config",
    "changed_tensors",
    "decisive",
    "in_folder",
    "quantized",
    "scheme",
]

# Words w0 to w59, drawn once.
TEXTS = [
    text_of(torch.randint(0, 60, (12,), generator=torch.Generator().manual_seed(seed)).tolist())
    for seed in range(6)
]


def decisive(make: Callable[..., nn.Module] = llama, **changes: Any) -> nn.Module:
    """Return a model whose predictions differ from token to token: its weights are large."""
    return make(initializer_range=0.25, **changes)


def in_folder(model: nn.Module, folder: Path) -> Path:
    model.save_pretrained(folder)
    word_tokenizer(chat_template=CHAT).save_pretrained(folder)
    return folder


def scheme(bits: int, group: int | None = None) -> dict[str, Any]:
    strategy = "channel" if group is None else "group"
    return {"num_bits": bits, "strategy": strategy, "group_size": group}


def quantized(model: nn.Module, folder: Path, recipe: Recipe | None = None) -> Path:
    """Write a checkpoint of a model: without a recipe, in 8 bits per channel."""
    if recipe is None:
        recipe = Recipe.from_preset("W8A16", weights=scheme(8))
    calibration = Calibration(model, recipe, compiler="eager")
    calibration.finalize()
    calibration.save(folder, report=False)
    word_tokenizer(chat_template=CHAT).save_pretrained(folder)
    return folder


def changed_tensors(folder: Path, to: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """Copy a model, and change the tensors of the copy."""
    shutil.copytree(folder, to)
    file = to / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file({name: each.clone() for name, each in tensors.items()}, file, {"format": "pt"})
    return to


def changed_config(folder: Path, to: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """Copy a model, and change the config of the copy."""
    shutil.copytree(folder, to)
    config = json.loads((to / "config.json").read_text())
    change(config)
    (to / "config.json").write_text(json.dumps(config))
    return to
