"""Costs: how far each format of each unit moves the predictions of a model."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from compressed_tensors.quantization import QuantizationConfig

from inlay.calibration import Calibration
from inlay.checkpoint.contents import compressed_layer
from inlay.checkpoint.layers import quantized_layers
from inlay.compensation.gptq import output_errors
from inlay.compensation.settings import GPTQ
from inlay.model import Weight
from inlay.observers import QParamsDict
from inlay.observers.hessian import whole
from inlay.progress import watched
from inlay.recipe import Recipe
from inlay.searching.formats import Format
from inlay.searching.sensitivity import Sensitivity
from inlay.searching.units import Unit

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

    Ranges and GPTQ are those of a calibration with the same statistics, so scores hold for what
    `inlay calibrate` makes of the recipe.

    :param observed: has gathered XᵀX of all layers
    :param units: those that the format fits
    :param sensitivity: of each layer; None scores errors relative to the layer's output
    """
    targets = [target for unit in units for target in unit.targets]
    group = chosen.targeting(targets)
    config = QuantizationConfig(config_groups={"group_0": group})
    recipe = Recipe.from_config(config, gptq=gptq)
    # Another calibration of the same model, because the observed one keeps its Hessians.
    calibration = Calibration.from_statistics(
        observed.model, recipe, observed.stored(), progress=progress
    )
    qparams = calibration.finalize(accept={"unobserved"})
    weights = calibration.graphs.weights
    tokens = max(1, observed.statistics.data_seen.tokens)
    names = [name for unit in units for name in unit.layers]
    costs: dict[str, float] = {}
    quantized: dict[str, torch.Tensor] = {}
    for name in watched(names, f"scoring {chosen.name}", show=progress):
        view = calibration.plan.weights[name]
        quantized[name] = weights.quantized(view, qparams)
        plain = weights.original(view).detach()
        known = None if sensitivity is None else sensitivity.get(name)
        hessian = _hessian(observed, name)
        if hessian is None:
            costs[name] = 0.0  # no token reached it
            continue
        errors = _errors(quantized[name].float() - plain.float(), hessian)
        if sensitivity is None:
            signal = float(_errors(plain.float(), hessian).sum())
            costs[name] = float(errors.sum()) / signal if signal else 0.0
        elif known is not None:
            costs[name] = 0.5 * float(known.mean @ errors.double()) / tokens
    return FormatCosts(_sizes(calibration, qparams, names), costs, quantized)


def _hessian(observed: Calibration, name: str) -> torch.Tensor | None:
    known = observed.statistics.of(observed.plan.slots[f"{name}.weight"].hessian)
    return None if known is None or known.is_empty else whole(known.tensors["hessian"])


def _errors(difference: torch.Tensor, hessian: torch.Tensor) -> torch.Tensor:
    """Return the squared error of each output, summed over tokens."""
    return output_errors(difference.unsqueeze(0), hessian.unsqueeze(0)).squeeze(0)


def _plain_size(calibration: Calibration, view: Weight) -> int:
    return view.numel * calibration.graphs.weights.original(view).element_size()


def _sizes(
    calibration: Calibration, qparams: Mapping[str, QParamsDict], names: Sequence[str]
) -> dict[str, int]:
    """Return the bytes of each layer in a checkpoint; those of one shape take the same."""
    layers = {layer.name: layer for layer in quantized_layers(calibration.model, calibration.plan)}
    known: dict[tuple[int, int], int] = {}
    for name in names:
        shape = calibration.plan.weights[name].shape
        if shape not in known:
            stored = compressed_layer(layers[name], qparams, calibration.graphs.weights)
            known[shape] = sum(tensor.nbytes for tensor in stored.values())
    return {name: known[calibration.plan.weights[name].shape] for name in names}
