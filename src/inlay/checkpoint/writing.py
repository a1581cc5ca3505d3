"""Writing a checkpoint that transformers and vLLM load, one block of the model at a time."""

import copy
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import ModelCompressor
from torch import nn

from inlay.checkpoint.contents import Contents
from inlay.checkpoint.files.left_over import LeftOver
from inlay.checkpoint.files.sentence_folders import SentenceFolder
from inlay.checkpoint.gate import require_servable
from inlay.checkpoint.layers import (
    QuantizedLayer,
    quantization_config,
    quantized_layers,
)
from inlay.checkpoint.loading import require_full_precision, require_in_memory
from inlay.checkpoint.shards import Shards, complete, name_files, size_in_bytes
from inlay.checkpoint.source import Source
from inlay.errors import ConfigurationError
from inlay.formats.storage import dtype_to_load
from inlay.observers import QParamsDict
from inlay.progress import watched
from inlay.ranks.division import Part, share
from inlay.ranks.identity import is_first, size
from inlay.ranks.together import meet
from inlay.recipe import Plan, Recipe
from inlay.recipe.served_stacks import warn_of_plain_stacks
from inlay.steps.weights import Weights
from inlay.transformers_private import copy_remote_code, read_as_linear

__all__ = [
    "CheckpointSizes",
    "finish_checkpoint",
    "require_servable",
    "save_checkpoint",
    "size_of_model",
]


@dataclass(frozen=True, kw_only=True)
class CheckpointSizes:
    """Bytes of all tensors of a model, in memory and as written."""

    before: int
    after: int


def save_checkpoint(
    folder: str | Path,
    model: nn.Module,
    plan: Plan,
    recipe: Recipe,
    qparams: Mapping[str, QParamsDict],
    *,
    tokenizer: Any = None,
    max_shard_size: int | str = "5GB",
    accept: Collection[str] = (),
    weights: Weights,
    progress: bool | None = None,
) -> CheckpointSizes:
    """Write a model with its qparams into a folder, as llm-compressor would.

    Over ranks, every rank calls it: each compresses and writes some blocks of the model. The model
    stays as it is. In addition, memory holds one compressed block and one file.

    :param folder: an existing folder that all ranks see, best one from `inlay.files.new_folder`
    :param qparams: the result of `Calibration.finalize`
    :param tokenizer: a tokenizer or processor to write beside the model
    :param max_shard_size: the largest size of a file with weights, `"5GB"` for example
    :param accept: problems to accept instead of refusing, as in `Calibration.finalize`
    :param weights: those of the calibration, as its steps left them
    :param progress: draw a progress bar; by default if there is a terminal
    """
    _require_saveable(model)
    full_precision = require_servable(plan, qparams, accept=accept)
    layers = quantized_layers(model, plan, full_precision)
    contents = Contents.of(model, plan, layers, weights)
    folder = Path(folder)
    files = Shards(folder, 0, size_in_bytes(max_shard_size), writer="new", digests=False)
    blocks = _blocks(contents.unquantized, layers)
    turns = (range(n, min(n + size(), len(blocks))) for n in range(0, len(blocks), size()))
    total = -(-len(blocks) // size())
    for turn in watched(turns, "writing the checkpoint", total=total, show=progress):
        tensors: dict[str, torch.Tensor] = {}
        places: dict[str, tuple[int, int]] = {}
        for number in share({number: blocks[number].cost for number in turn}, Part.own()):
            block = blocks[number]
            saved, _ = contents.tensors(block.unquantized, block.layers, qparams)
            places |= {name: (number, place) for place, name in enumerate(saved)}
            tensors |= saved
        files.add(tensors, places)
    written = files.close()
    meet()  # until here, other ranks write
    after = 0
    if is_first():
        complete(written)
        names = [each.path.name for each in written]
        after = finish_checkpoint(folder, names, contents, plan, recipe, layers, tokenizer)
    return CheckpointSizes(before=size_of_model(model), after=after)


def finish_checkpoint(
    folder: Path,
    names: Iterable[str],
    contents: Contents,
    plan: Plan,
    recipe: Recipe,
    layers: Sequence[QuantizedLayer],
    tokenizer: Any,
) -> int:
    """Name the files with weights as transformers does, and write index, configs and tokenizer.

    :param names: those of the files, in order
    :return: bytes of all tensors
    """
    model = contents.model
    parameters = sum(parameter.numel() for parameter in model.parameters())
    config = quantization_config(model, recipe, layers)
    source = _folder_of(model)
    left_over = None if source is None else LeftOver.of(model, source)
    if left_over is not None:
        names = [*names, *left_over.copy_to(folder)]
        config.ignore = [*(config.ignore or []), *left_over.ignored]
    total = name_files(folder, names, parameters=parameters)
    formats = [scheme.format for scheme in config.config_groups.values()]
    cut = read_as_linear(model)
    left = {name: why for name, why in plan.stacks_left.items() if name not in cut}
    warn_of_plain_stacks(left, formats)
    dtype = dtype_to_load(formats)
    _write_configs(folder, model, contents.keep_ties, dtype)
    ModelCompressor(quantization_config=config).update_config(str(folder))
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    sentences = None if source is None else SentenceFolder.at(source)
    if sentences is not None and (not sentences.has_no_head or model.base_model is model):
        sentences.copy_to(folder, with_tokenizer=tokenizer is None)
    return total


def _folder_of(model: Any) -> Path | None:
    """Return the folder that a model was loaded from, if it is still there."""
    place = getattr(model, "name_or_path", "")
    try:
        return Source.of(place).folder() if place else None
    except ConfigurationError:  # it is gone, or not in the cache
        return None


def _require_saveable(model: nn.Module) -> None:
    if not hasattr(model, "config") or not hasattr(model, "save_pretrained"):
        raise ConfigurationError(
            f"{type(model).__name__} is not a model of transformers; only such models can be "
            "written as a checkpoint"
        )
    require_full_precision(model.config, type(model).__name__)
    require_in_memory(model)


@dataclass(frozen=True, kw_only=True)
class _Block:
    """A part of a model that one rank compresses and writes.

    :param unquantized: tensors to write as they are
    """

    unquantized: dict[str, torch.Tensor]
    layers: list[QuantizedLayer]

    @property
    def cost(self) -> int:
        weights = (layer.weight for layer in self.layers)
        return sum(weight.numel for weight in weights if weight is not None)


def _blocks(state: Mapping[str, torch.Tensor], layers: Iterable[QuantizedLayer]) -> list[_Block]:
    """Group tensors and layers by the block of the model that they belong to."""
    blocks: dict[str, _Block] = {}

    def block_of(name: str) -> _Block:
        return blocks.setdefault(_block_of(name), _Block(unquantized={}, layers=[]))

    for name, tensor in state.items():
        block_of(name).unquantized[name] = tensor
    for layer in layers:
        block_of(f"{layer.name}.").layers.append(layer)
    return list(blocks.values())


def _block_of(name: str) -> str:
    """Return a name up to its first number, such as `model.layers.3`."""
    found = re.match(r"(?:[^.]+\.)*?\d+(?=\.)", name)
    return found[0] if found else ""


def _write_configs(folder: Path, model: Any, keep_ties: bool, dtype: torch.dtype | None) -> None:
    """Write the configs of a model, with the dtype to load it in if that is not its own."""
    config = copy.deepcopy(model.config)
    config.dtype = str(dtype or model.dtype).removeprefix("torch.")
    config.architectures = [type(model).__name__]
    if not keep_ties:
        for part in (config, config.get_text_config(decoder=True)):
            part.tie_word_embeddings = False
    if model.is_remote_code():
        copy_remote_code(model, folder, config=config)
    config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)


def size_of_model(model: nn.Module) -> int:
    """Return the bytes of a checkpoint of the model, counting tied tensors once."""
    tensors = {id(tensor): tensor for tensor in model.state_dict(keep_vars=True).values()}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
