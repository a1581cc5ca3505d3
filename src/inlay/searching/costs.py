"""Costs: how far each format of each unit moves the predictions of a model."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from compressed_tensors.quantization import QuantizationConfig

from inlay.calibration import Calibration
from inlay.checkpoint.contents import compressed_layer
from inlay.checkpoint.layers import quantized_layers
from inlay.compensation.gptq import output_errors
from inlay.compensation.settings import GPTQ
from inlay.model import Weight
from inlay.observers.hessian import whole
from inlay.progress import watched
from inlay.recipe import Gathers, Recipe
from inlay.searching.formats import Format
from inlay.searching.sensitivity import Sensitivity
from inlay.searching.units import Unit
from inlay.statistics.on_disk import StoredStatistics

__all__ = ["FormatCosts", "costs_of_format", "plain_costs"]


@dataclass(frozen=True, eq=False)
class FormatCosts:
    """What a format takes and costs, by layer, and the weights in it.

    :param sizes: bytes in a checkpoint
    :param costs: predicted KL divergence per token
    :param weights: quantized weights, in the dtype of the model
    """

    sizes: Mapping[str, int]
    costs: Mapping[str, float]
    weights: Mapping[str, torch.Tensor]


def plain_costs(calibration: Calibration, units: Iterable[Unit]) -> FormatCosts:
    """Return the costs of layers that stay as they are."""
    views = [calibration.plan.weights[name] for unit in units for name in unit.layers]
    sizes = {view.module: _plain_size(calibration, view) for view in views}
    return FormatCosts(sizes, dict.fromkeys(sizes, 0.0), {})


def costs_of_format(
    observed: Calibration,
    units: Sequence[Unit],
    chosen: Format,
    *,
    gptq: GPTQ | None,
    sensitivity: Mapping[str, Sensitivity] | None,
    progress: bool | None = None,
) -> FormatCosts:
    """Quantize layers in a format, and score the errors of their outputs.

    Ranges and GPTQ are those of a calibration with the same statistics, so the weights are those
    that `inlay calibrate` makes of the recipe. GPTQ fits weights to the tokens that it is given,
    and more closely if they have many columns. So scores with GPTQ are errors on held-out tokens,
    of weights made without these.

    :param observed: has gathered XᵀX of all layers, and with GPTQ also of held-out tokens
    :param units: those that the format fits
    :param sensitivity: of each layer; None scores errors relative to the layer's output
    """
    targets = [target for unit in units for target in unit.targets]
    config = QuantizationConfig(config_groups={"group_0": chosen.targeting(targets)})
    recipe = Recipe.from_config(config, gptq=gptq)
    stored = observed.stored()
    made = _finalized(observed, recipe, stored, progress)
    judged = made
    if gptq is not None:
        judged = _finalized(observed, recipe, _without_held_out(stored), progress)
    tokens = max(1, observed.statistics.data_seen.tokens)
    costs: dict[str, float] = {}
    weights: dict[str, torch.Tensor] = {}
    names = [name for unit in units for name in unit.layers]
    for name in watched(names, f"scoring {chosen.name}", show=progress):
        plain = _plain(observed, name)
        weights[name] = _quantized(made, name)
        tried = weights[name] if judged is made else _quantized(judged, name)
        hessians = _hessians(observed, name, held_out=judged is not made)
        if hessians is None:
            costs[name] = 0.0  # no token reached it
            continue
        whole_signal, signal = (float(_errors(plain, hessian).sum()) for hessian in hessians)
        errors = _errors(tried.float() - plain, hessians[1])
        scale = whole_signal / signal if signal else 0.0
        known = None if sensitivity is None else sensitivity.get(name)
        if sensitivity is None:
            costs[name] = float(errors.sum()) / signal if signal else 0.0
        elif known is not None:
            costs[name] = 0.5 * scale * float(known.mean @ errors.double()) / tokens
    return FormatCosts(_sizes(made, names), costs, weights)


def _finalized(
    observed: Calibration, recipe: Recipe, stored: StoredStatistics, progress: bool | None
) -> Calibration:
    """Return a finalized calibration of the same model; the observed one keeps its Hessians."""
    calibration = Calibration.from_statistics(observed.model, recipe, stored, progress=progress)
    calibration.finalize(accept={"unobserved"})
    return calibration


def _without_held_out(stored: StoredStatistics) -> StoredStatistics:
    """Return statistics whose Hessians leave out the tokens that were held out."""
    left: dict[int, torch.Tensor] = {}  # layers that read one value share its Hessian
    slots = dict(stored.slots)
    for name, known in stored.slots.items():
        held_out = stored.slots.get(known.slot.held_out_hessian.moved_to(_module(name)).name)
        if known.slot.gathers is not Gathers.HESSIAN or held_out is None:
            continue
        hessian = known.tensors["hessian"]
        if id(hessian) not in left:
            left[id(hessian)] = hessian - held_out.tensors["hessian"]
        slots[name] = replace(known, tensors={"hessian": left[id(hessian)]})
    return replace(stored, slots=slots)


def _module(slot: str) -> str:
    return slot.rpartition(".")[0]


def _plain(calibration: Calibration, name: str) -> torch.Tensor:
    return calibration.graphs.weights.of_module(name).detach().float()


def _quantized(calibration: Calibration, name: str) -> torch.Tensor:
    assert calibration.qparams is not None, "it is finalized"
    view = calibration.plan.weights[name]
    return calibration.graphs.weights.quantized(view, calibration.qparams)


def _hessians(
    observed: Calibration, name: str, *, held_out: bool
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the Hessian of all tokens and the one to judge by; None without any tokens.

    Without held-out tokens, as of an expert that few reach, both are the same.
    """
    slot, statistics = observed.plan.slots[f"{name}.weight"], observed.statistics
    known = statistics.of(slot.hessian)
    if known is None or known.is_empty:
        return None
    hessian = whole(known.tensors["hessian"])
    part = statistics.of(slot.held_out_hessian) if held_out else None
    if part is None or part.is_empty or not bool(part.tensors["hessian"].any()):
        return hessian, hessian
    return hessian, whole(part.tensors["hessian"])


def _errors(difference: torch.Tensor, hessian: torch.Tensor) -> torch.Tensor:
    """Return the squared error of each output, summed over tokens."""
    return output_errors(difference.unsqueeze(0), hessian.unsqueeze(0)).squeeze(0)


def _plain_size(calibration: Calibration, view: Weight) -> int:
    return view.numel * calibration.graphs.weights.original(view).element_size()


def _sizes(calibration: Calibration, names: Sequence[str]) -> dict[str, int]:
    """Return the bytes of each layer in a checkpoint; those of one shape take the same."""
    qparams = calibration.qparams
    assert qparams is not None, "it is finalized"
    layers = {layer.name: layer for layer in quantized_layers(calibration.model, calibration.plan)}
    known: dict[tuple[int, int], int] = {}
    for name in names:
        shape = calibration.plan.weights[name].shape
        if shape not in known:
            stored = compressed_layer(layers[name], qparams, calibration.graphs.weights)
            known[shape] = sum(tensor.nbytes for tensor in stored.values())
    return {name: known[calibration.plan.weights[name].shape] for name in names}
