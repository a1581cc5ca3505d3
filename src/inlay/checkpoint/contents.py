"""What a checkpoint holds: compressed layers, and the tensors that stay as they are."""

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from compressed_tensors.quantization.lifecycle.initialize import initialize_qparams
from torch import nn

from inlay.checkpoint.compressing import compressed_weight
from inlay.checkpoint.gate import describe_unusable
from inlay.checkpoint.layers import QuantizedLayer
from inlay.errors import ConfigurationError, StatisticsError
from inlay.model import Stack, saved_names
from inlay.observers import QParamsDict
from inlay.recipe import Plan, Slot
from inlay.recipe.served_stacks import require_all_or_none
from inlay.steps.weights import Weights
from inlay.transformers_private import (
    Loading,
    as_saved,
    left_out_of_saving,
    read_as_linear,
    without_ties,
)

__all__ = ["Contents", "compressed_layer"]


@dataclass(frozen=True, eq=False, kw_only=True)
class Contents:
    """What a checkpoint holds, whether it is written at once or block by block.

    :param keep_ties: whether tied weights are written once
    :param unquantized: the tensors to write unchanged, under the model's own names
    :param names: the names under which weights in stacks are saved, by module
    """

    model: nn.Module
    keep_ties: bool
    unquantized: Mapping[str, torch.Tensor]
    names: Mapping[str, str]
    weights: Weights

    @classmethod
    def of(
        cls, model: nn.Module, plan: Plan, layers: Sequence[QuantizedLayer], weights: Weights
    ) -> "Contents":
        """Collect the tensors of a checkpoint with these layers.

        :raises StatisticsError: if only some weights of a stack are among the layers
        """
        keep_ties = not _shares_quantized_weight(model, layers)
        names: dict[str, str] = {}
        for stack in _written(plan, layers):
            names.update(saved_names(model, stack))
        return cls(
            model=model,
            keep_ties=keep_ties,
            unquantized=_unquantized_state(model, layers, keep_ties),
            names=names,
            weights=weights,
        )

    def tensors(
        self,
        unquantized: Mapping[str, torch.Tensor],
        layers: Iterable[QuantizedLayer],
        qparams: Mapping[str, QParamsDict],
    ) -> tuple[dict[str, torch.Tensor], list[str]]:
        """Return the tensors of one block as they are written, and the names of those of layers."""
        # Compressed here, not kept in the block, so that it is freed once it is written.
        quantized: dict[str, torch.Tensor] = {}
        for layer in layers:
            quantized |= compressed_layer(layer, qparams, self.weights)
        plain = dict(unquantized)
        equalized = self.weights.equalized
        own = dict(self.model.named_parameters(remove_duplicate=False))
        changed = (name for name in plain if equalized.is_changed(own.get(name)))
        plain.update({name: equalized.of(own[name]) for name in changed})
        plain = _one_by_one(self.model, plain)
        saved = _as_saved(self.model, plain, quantized, self.names)
        compressed = {id(tensor) for tensor in quantized.values()}
        return saved, [name for name, tensor in saved.items() if id(tensor) in compressed]


def _written(plan: Plan, layers: Sequence[QuantizedLayer]) -> list[Stack]:
    """Return the stacks whose weights are written as layers: all of a module, or none.

    :raises StatisticsError: if only some are
    """
    names = {layer.name for layer in layers}
    found: list[Stack] = []
    for holder, stacks in groupby(plan.stacks.values(), lambda stack: stack.holder):
        own = list(stacks)
        members = [weight.module for stack in own for weight in stack.weights]
        without = [name for name in members if name not in names]
        found += own if require_all_or_none(holder, members, without) else []
    return found


def _shares_quantized_weight(model: nn.Module, layers: Iterable[QuantizedLayer]) -> bool:
    """Return whether a quantized weight is tied to another.

    A loader ties a single tensor; a quantized weight is several tensors of another type.
    """
    owners: dict[int, int] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    views = (layer.weight for layer in layers if layer.weight is not None)
    weights = (operator.attrgetter(view.parameter)(model) for view in views)
    return any(owners.get(id(weight), 0) > 1 for weight in weights)


def _unquantized_state(
    model: Any, layers: Iterable[QuantizedLayer], keep_ties: bool
) -> dict[str, torch.Tensor]:
    """Return the tensors to write unchanged, under the model's own names, without copying."""
    state: dict[str, torch.Tensor] = model.state_dict()
    for name in left_out_of_saving(model):
        state.pop(name, None)
    if keep_ties:
        state = without_ties(model, state)
    for layer in layers:
        if layer.weight is not None:
            state.pop(layer.weight.parameter, None)
    return state


def compressed_layer(
    layer: QuantizedLayer, qparams: Mapping[str, QParamsDict], weights: Weights
) -> dict[str, torch.Tensor]:
    """Return the tensors that quantization of a layer adds to a checkpoint."""
    state = {}
    for slot in layer.slots:
        state.update(_qparams_as_stored(layer, slot, qparams.get(slot.name, {})))
    if layer.weight is not None and layer.scheme is not None:
        weight = weights.current(layer.weight).detach()
        with torch.no_grad():
            state = compressed_weight(weight, state, layer.scheme)
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


def _one_by_one(model: nn.Module, plain: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Cut stacks in full precision that loaders replace by a Linear for each matrix."""
    stacks = [f"{name}." for name in read_as_linear(model)]
    found: dict[str, torch.Tensor] = {}
    for name, tensor in plain.items():
        holder = next((each for each in stacks if name.startswith(each)), None)
        if holder is None:
            found[name] = tensor
            continue
        own = name.removeprefix(holder)
        projections = ("gate_proj", "up_proj") if own == "gate_up_proj" else (own,)
        for number, matrix in enumerate(tensor):  # inputs first
            for projection, part in zip(
                projections, matrix.chunk(len(projections), 1), strict=True
            ):
                found[f"{holder}{number}.{projection}.weight"] = part.t().contiguous()
    return found


def _as_saved(
    model: Any,
    unquantized: dict[str, torch.Tensor],
    quantized: dict[str, torch.Tensor],
    names: Mapping[str, str],
) -> dict[str, torch.Tensor]:
    """Return the tensors under the names, and in the form, that transformers saves.

    :param names: the names under which weights in stacks are saved, by module
    """
    named, others = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for name, tensor in quantized.items():
        module, _, part = name.rpartition(".")
        if module in names:
            named[f"{names[module]}.{part}"] = tensor
        else:
            others[name] = tensor
    plain = {**unquantized, **others}
    saved = as_saved(model, plain)
    kept = {id(tensor) for tensor in saved.values()}
    changed = [name for name, tensor in others.items() if id(tensor) not in kept]
    if changed:
        apart = _kept_apart(model, plain, changed)
        rest = {name: tensor for name, tensor in plain.items() if name not in apart}
        saved = {**as_saved(model, rest), **{name: plain[name] for name in apart}}
    return {**saved, **named}


def _kept_apart(
    model: Any, tensors: Mapping[str, torch.Tensor], changed: Sequence[str]
) -> list[str]:
    """Return the tensors to write under the model's own names, as saving would merge them.

    Packed weights and scales cannot be merged. A loader that splits merged tensors also reads those
    under the names of the model.

    :param changed: the names of quantized tensors that saving would merge or split
    :raises ConfigurationError: if a loader does not read them
    """
    places = {
        name: set(as_saved(model, {name: torch.empty_like(tensor, device="meta")}))
        for name, tensor in tensors.items()
    }
    merged = set[str]().union(*(places[name] for name in changed))
    apart = [name for name, own in places.items() if own & merged]
    weights = {name for name in apart if name in model.state_dict()}
    read = Loading.of(model).sources(model, weights)
    unread = [name for name in weights if read.get(name) != [name]]
    if unread:
        raise ConfigurationError(
            f"saving would merge or split {', '.join(sorted(unread))}, which is impossible for "
            "quantized tensors; ignore these modules in the recipe"
        )
    return apart
