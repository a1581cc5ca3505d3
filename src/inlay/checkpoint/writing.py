"""Writing a checkpoint that transformers and vLLM load, one block of the model at a time."""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor, ModelCompressor
from compressed_tensors.quantization.lifecycle.initialize import initialize_qparams
from torch import nn

from inlay.checkpoint.compressing import Block, compressed_blocks, pays_to_share
from inlay.checkpoint.configs import warn_of_experts, write_configs
from inlay.checkpoint.gate import describe_unusable, require_servable
from inlay.checkpoint.layers import (
    QuantizedLayer,
    quantization_config,
    quantized_layers,
)
from inlay.checkpoint.loading import require_full_precision
from inlay.checkpoint.shards import Shards, size_in_bytes
from inlay.equalization.parameters import EqualizedParameters
from inlay.errors import ConfigurationError, StatisticsError
from inlay.observers import QParamsDict
from inlay.progress import watched
from inlay.recipe import Plan, Recipe, Slot
from inlay.recipe.experts import ExpertStack

__all__ = [
    "CheckpointSizes",
    "Contents",
    "finish_checkpoint",
    "help_with_checkpoint",
    "require_servable",
    "save_checkpoint",
    "size_of_model",
]

_NAMED = 8  # how many experts an error names


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
    equalized: EqualizedParameters | None = None,
    progress: bool | None = None,
) -> CheckpointSizes:
    """Write a model with its qparams into a folder, as llm-compressor would.

    The model stays as it is. In addition, memory holds one compressed block and one shard.

    :param folder: an existing folder, best one from `inlay.files.new_folder`
    :param qparams: the result of `Calibration.finalize`
    :param tokenizer: a tokenizer or processor to write beside the model
    :param max_shard_size: the largest size of a file with weights, `"5GB"` for example
    :param accept: problems to accept instead of refusing, as in `Calibration.finalize`
    :param equalized: scaled copies of parameters, which are written in their place
    :param progress: draw a progress bar; by default if there is a terminal
    """
    _require_saveable(model)
    max_size = size_in_bytes(max_shard_size)
    full_precision = require_servable(plan, qparams, accept=accept)
    stacks = _quantized_stacks(plan, full_precision)
    layers = quantized_layers(model, plan, recipe, full_precision)
    contents = Contents.of(model, layers, stacks, equalized)
    folder = Path(folder)
    shards = Shards(folder, max_size)
    blocks = _blocks(contents.unquantized, layers)
    compressed = compressed_blocks(
        blocks, lambda layer: _compressed(layer, qparams, equalized), shared=pays_to_share(layers)
    )
    bar = watched(compressed, "writing the checkpoint", total=len(blocks), show=progress)
    for unquantized, quantized in bar:
        shards.add(contents.as_saved(unquantized, quantized))
    shards.close(parameters=sum(parameter.numel() for parameter in model.parameters()))
    finish_checkpoint(folder, contents, plan, recipe, layers, tokenizer=tokenizer)
    return CheckpointSizes(before=size_of_model(model), after=shards.total_size)


@dataclass(frozen=True, eq=False, kw_only=True)
class Contents:
    """What a checkpoint holds, whether it is written at once or block by block.

    :param keep_ties: whether tied weights are written once
    :param unquantized: the tensors to write unchanged, under the model's own names
    :param experts: the names of experts that are saved as modules, by their names in the model
    """

    model: nn.Module
    keep_ties: bool
    unquantized: Mapping[str, torch.Tensor]
    experts: Mapping[str, str]
    equalized: EqualizedParameters | None

    @classmethod
    def of(
        cls,
        model: nn.Module,
        layers: Sequence[QuantizedLayer],
        stacks: Iterable[ExpertStack],
        equalized: EqualizedParameters | None,
    ) -> "Contents":
        keep_ties = not _shares_quantized_weight(model, layers)
        state = _unquantized_state(model, layers, keep_ties)
        names: dict[str, str] = {}
        for stack in stacks:
            state.pop(stack.name)
            names.update(_saved(model, stack))
        return cls(
            model=model, keep_ties=keep_ties, unquantized=state, experts=names, equalized=equalized
        )

    def tensors(
        self,
        unquantized: Mapping[str, torch.Tensor],
        layers: Iterable[QuantizedLayer],
        qparams: Mapping[str, QParamsDict],
    ) -> dict[str, torch.Tensor]:
        """Return the tensors of one block as they are written."""
        quantized = {}
        for layer in layers:
            quantized.update(_compressed(layer, qparams, self.equalized))
        return self.as_saved(unquantized, quantized)

    def as_saved(
        self, unquantized: Mapping[str, torch.Tensor], quantized: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Return the tensors of one block, of which some are compressed, as they are written."""
        plain = dict(unquantized)
        if self.equalized is not None:
            own = dict(self.model.named_parameters(remove_duplicate=False))
            changed = (name for name in plain if self.equalized.is_changed(own.get(name)))
            plain.update({name: self.equalized.of(own[name]) for name in changed})
        return _as_saved(self.model, plain, quantized, self.experts)


def finish_checkpoint(
    folder: Path,
    contents: Contents,
    plan: Plan,
    recipe: Recipe,
    layers: Sequence[QuantizedLayer],
    *,
    tokenizer: Any = None,
) -> None:
    """Write what belongs beside the weights: configs and tokenizer."""
    model = contents.model
    config = quantization_config(model, recipe, layers)
    warn_of_experts(plan, config)
    write_configs(folder, model, contents.keep_ties)
    ModelCompressor(quantization_config=config).update_config(str(folder))
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def help_with_checkpoint(
    model: nn.Module,
    plan: Plan,
    recipe: Recipe,
    qparams: Mapping[str, QParamsDict],
    *,
    accept: Collection[str] = (),
    equalized: EqualizedParameters | None = None,
) -> None:
    """Compress a part of the model for the first rank, which writes it with `save_checkpoint`.

    Every other rank calls it with the same arguments.
    """
    layers = quantized_layers(model, plan, recipe, require_servable(plan, qparams, accept=accept))
    if not pays_to_share(layers):
        return
    state = _unquantized_state(model, layers, not _shares_quantized_weight(model, layers))
    for stack in plan.stacks:
        state.pop(stack)
    for _ in compressed_blocks(
        _blocks(state, layers), lambda layer: _compressed(layer, qparams, equalized), shared=True
    ):
        pass


def _require_saveable(model: nn.Module) -> None:
    if not hasattr(model, "config") or not hasattr(model, "save_pretrained"):
        raise ConfigurationError(
            f"{type(model).__name__} is not a model of transformers; only such models can be "
            "written as a checkpoint"
        )
    require_full_precision(model.config, type(model).__name__)
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ConfigurationError(
            "some weights of the model are offloaded, not in memory; load it without device_map"
        )


def _quantized_stacks(plan: Plan, full_precision: Collection[str]) -> list[ExpertStack]:
    """Return the parameters whose experts are quantized: all of a module, or none.

    :raises StatisticsError: if only some experts of a module are
    """
    found: list[ExpertStack] = []
    for experts, stacks in groupby(plan.stacks.values(), lambda stack: stack.experts):
        own = list(stacks)
        members = [name for stack in own for name in stack.members]
        without = [name for name in members if name in full_precision]
        if without and len(without) < len(members):
            named = ", ".join(without[:_NAMED])
            more = f" and {len(without) - _NAMED} more" if len(without) > _NAMED else ""
            raise StatisticsError(
                f"{named}{more} would stay in full precision, and no server loads experts of which "
                f"only some are quantized; ignore all experts of {experts}"
            )
        found += [] if without else own
    return found


def _shares_quantized_weight(model: nn.Module, layers: Iterable[QuantizedLayer]) -> bool:
    """Return whether a quantized weight is tied to another.

    A loader ties a single tensor; a quantized weight is several tensors of another type.
    """
    owners: dict[int, int] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    weights = (getattr(layer.module, "weight", None) for layer in layers)
    return any(owners.get(id(weight), 0) > 1 for weight in weights if weight is not None)


def _unquantized_state(
    model: Any, layers: Iterable[QuantizedLayer], keep_ties: bool
) -> dict[str, torch.Tensor]:
    """Return the tensors to write unchanged, under the model's own names, without copying."""
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    state: dict[str, torch.Tensor] = model.state_dict()
    for name in getattr(model, "_keys_to_ignore_on_save", None) or ():
        state.pop(name, None)
    if keep_ties:
        state = remove_tied_weights_from_state_dict(state, model)
    for layer in layers:
        state.pop(f"{layer.name}.weight", None)
    return state


def _blocks(state: Mapping[str, torch.Tensor], layers: Iterable[QuantizedLayer]) -> list[Block]:
    """Group tensors and layers by the block of the model that they belong to."""
    blocks: dict[str, Block] = {}
    for name, tensor in state.items():
        blocks.setdefault(_block_of(name), ({}, []))[0][name] = tensor
    for layer in layers:
        blocks.setdefault(_block_of(f"{layer.name}."), ({}, []))[1].append(layer)
    return list(blocks.values())


def _block_of(name: str) -> str:
    """Return a name up to its first number, such as `model.layers.3`."""
    found = re.match(r"(?:[^.]+\.)*?\d+(?=\.)", name)
    return found[0] if found else ""


def _compressed(
    layer: QuantizedLayer,
    qparams: Mapping[str, QParamsDict],
    equalized: EqualizedParameters | None,
) -> dict[str, torch.Tensor]:
    """Return the tensors that quantization of a layer adds to a checkpoint."""
    state = {}
    for slot in layer.slots:
        state.update(_qparams_as_stored(layer, slot, qparams.get(slot.name, {})))
    if layer.weight is not None and layer.scheme is not None:
        compressor = BaseCompressor.get_value_from_registry(layer.scheme.format)
        weight = layer.weight if equalized is None else equalized.of(layer.weight)
        with torch.no_grad():
            state = compressor.compress({"weight": weight.detach(), **state}, layer.scheme)
    for name, tensor in state.items():
        if not name.endswith("scale") or not tensor.is_floating_point():
            continue
        # A small scale can become zero in the dtype that stores it.
        unusable = describe_unusable(name, tensor)
        if unusable is not None:
            raise StatisticsError(
                f"{layer.name} cannot be stored: {unusable} as {tensor.dtype}. Ignore the module "
                "in the recipe, or load the model in a wider dtype"
            )
    return {f"{layer.name}.{name}": tensor for name, tensor in state.items()}


def _qparams_as_stored(
    layer: QuantizedLayer, slot: Slot, found: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """Return qparams under the names, and with the shapes and dtypes, that a loader expects."""
    shell = nn.Module()
    shell.register_parameter("here", nn.Parameter(torch.empty(0, device="meta")))
    observed_shape = _observed_shape(layer, slot, found)
    initialize_qparams(shell, slot.base_name, slot.args, observed_shape, layer.dtype)
    stored = {}
    for key in slot.needed_qparams:
        name = f"{slot.base_name}_{key}"
        expected = shell.get_parameter(name)
        stored[name] = found[key].detach().to(expected.dtype).reshape(expected.shape)
    return stored


def _observed_shape(
    layer: QuantizedLayer, slot: Slot, found: Mapping[str, Any]
) -> tuple[int | None, ...]:
    """Return the known dimensions of the observed value, aligned to the right."""
    if layer.weight is None:  # (heads, tokens, size of a head), with a scale for each head or one
        return (found["scale"].numel(), None, None)
    rows, columns = layer.weight.shape
    return {"weight": (rows, columns), "input": (columns,), "output": (rows,)}[slot.base_name]


def _saved(model: Any, stack: ExpertStack) -> Iterator[tuple[str, str]]:
    """Yield the names of experts in the model, and those that their weights have when saved.

    :raises ConfigurationError: if transformers does not save one matrix for each
    """
    from transformers.core_model_loading import revert_weight_conversion

    # Numbers in place of rows tell which part of the parameter is saved under which name.
    experts, rows, _ = stack.parameter.shape
    parts = len(stack.projections)
    numbers = torch.arange(experts * parts).repeat_interleave(rows // parts)
    # Of two columns: transformers drops a dimension of size one.
    marked = numbers.reshape(experts, rows, 1).repeat(1, 1, 2)
    saved = revert_weight_conversion(model, {stack.name: marked})
    place = {int(tensor.flatten()[0]): name for name, tensor in saved.items() if tensor.dim() == 2}
    if len(place) != len(stack.members):
        raise ConfigurationError(
            f"transformers saves {stack.name} as {', '.join(list(saved)[:3])}, not as a matrix for "
            "each expert; ignore its experts in the recipe"
        )
    for number, name in enumerate(stack.members):
        yield name, place[number].removesuffix(".weight")


def _as_saved(
    model: Any,
    unquantized: dict[str, torch.Tensor],
    quantized: dict[str, torch.Tensor],
    experts: Mapping[str, str],
) -> dict[str, torch.Tensor]:
    """Return the tensors under the names, and in the form, that transformers saves.

    :param experts: the names of experts that are saved as modules, by their names in the model
    """
    from transformers.core_model_loading import revert_weight_conversion

    named, others = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for name, tensor in quantized.items():
        module, _, part = name.rpartition(".")
        if module in experts:
            named[f"{experts[module]}.{part}"] = tensor
        else:
            others[name] = tensor
    converted: dict[str, torch.Tensor] = revert_weight_conversion(model, {**unquantized, **others})
    saved = {**converted, **named}
    kept = {id(tensor) for tensor in saved.values()}
    changed = [name for name, tensor in quantized.items() if id(tensor) not in kept]
    if changed:
        raise ConfigurationError(
            f"saving would merge or split {', '.join(changed)}, which is impossible for quantized "
            "tensors; ignore these modules in the recipe"
        )
    return saved


def size_of_model(model: nn.Module) -> int:
    """Return the bytes of a checkpoint of the model, counting tied tensors once."""
    tensors = {id(tensor): tensor for tensor in model.state_dict(keep_vars=True).values()}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
