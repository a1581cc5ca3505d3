"""The signal of each layer over its quantization error."""

import math
from collections.abc import Mapping

import torch

from inlay.calibration.bindings import Bindings
from inlay.observers import QParamsDict
from inlay.recipe import Plan, Slot
from inlay.report.data import LayerError
from inlay.steps.weights import Weights

__all__ = ["Noise", "layer_errors", "weight_errors"]

_WEIGHTED = ("weight", "input")
_AT_ONCE = 1 << 20  # values


class Noise:
    """The power of a signal and that of its error."""

    def __init__(self) -> None:
        self.signal = 0.0
        self.error = 0.0
        self.is_empty = True

    def add(self, exact: torch.Tensor, quantized: torch.Tensor) -> "Noise":
        # Part by part: in float32, and with their difference, large weights would be many times
        # as large.
        rows = max(1, _AT_ONCE * len(exact) // max(1, exact.numel())) if exact.dim() else 1
        for one, other in zip(_split(exact, rows), _split(quantized, rows), strict=True):
            one = one.float()
            self.signal += _power(one)
            self.error += _power(other.float() - one)
        self.is_empty = False
        return self

    @classmethod
    def of(cls, signal: torch.Tensor, error: torch.Tensor, *, rows: torch.Tensor) -> "Noise":
        """The noise of powers that were summed up elsewhere, over so many rows."""
        noise = cls()
        noise.signal, noise.error, noise.is_empty = float(signal), float(error), int(rows) == 0
        return noise

    @property
    def decibels(self) -> float | None:
        """The ratio in dB: Inf without error, None if nothing was compared or it is not finite."""
        if self.is_empty or not (math.isfinite(self.signal) and math.isfinite(self.error)):
            return None
        if self.error == 0:
            return math.inf if self.signal else None
        return 10 * math.log10(self.signal / self.error) if self.signal else -math.inf


def layer_errors(bindings: Bindings, plan: Plan | None = None) -> tuple[LayerError, ...]:
    """Compute the SQNR of quantized Linear and Embedding modules, in the order of the model.

    Each layer is judged alone: it gets what the plain model feeds it, with weight and input
    quantized. A quantized output is not counted. A layer that no data reached has the SQNR of its
    weight only.

    :param bindings: holds the sums of the pass CompareLayers
    :param plan: a part of the plan whose weights are in memory; by default all of it
    """
    plan = plan or bindings.statistics.plan
    return tuple(
        LayerError(
            module=name,
            sqnr_db=_output(bindings, name).decibels,
            weight_sqnr_db=_weight(bindings, plan, slots).decibels,
            input_sqnr_db=_input(bindings, name, slots).decibels,
        )
        for name in plan.places
        if (slots := _quantized_slots(bindings, plan, name))
    )


def weight_errors(
    plan: Plan, qparams: Mapping[str, QParamsDict], weights: Weights
) -> tuple[LayerError, ...]:
    """Compute the SQNR of quantized weights alone, as `layer_errors` does where no data ran.

    :param plan: a plan, or a part of it whose weights are in memory
    :param weights: those of the calibration, as its steps left them
    """
    found: dict[str, Noise] = {}
    for slot in plan.slots.values():
        if slot.base_name not in _WEIGHTED or not slot.is_quantized(qparams):
            continue
        known = found.setdefault(slot.module, Noise())
        if slot.is_weight:
            view = plan.weights[slot.module]
            known.add(weights.plain(view).detach(), weights.quantized(view, qparams))
    return tuple(
        LayerError(module=module, sqnr_db=None, weight_sqnr_db=noise.decibels)
        for module, noise in found.items()
    )


def _output(bindings: Bindings, module: str) -> Noise:
    sums = bindings.layer_errors.get(module)
    return Noise() if sums is None else Noise.of(sums[0], sums[1], rows=sums[4])


def _input(bindings: Bindings, module: str, slots: Mapping[str, Slot]) -> Noise:
    sums = bindings.layer_errors.get(module)
    if sums is None or "input" not in slots:
        return Noise()
    return Noise.of(sums[2], sums[3], rows=sums[4])


def _weight(bindings: Bindings, plan: Plan, slots: Mapping[str, Slot]) -> Noise:
    if "weight" not in slots:
        return Noise()
    weights, view = bindings.weights, plan.weights[slots["weight"].module]
    assert bindings.statistics.qparams is not None
    quantized = weights.quantized(view, bindings.statistics.qparams)
    return Noise().add(weights.plain(view).detach(), quantized)


def _quantized_slots(bindings: Bindings, plan: Plan, module: str) -> dict[str, Slot]:
    """Slots of weight and input that the finalized model quantizes."""
    statistics = bindings.statistics
    assert statistics.qparams is not None
    return {
        base_name: slot
        for base_name, slot in plan.of_module(module).items()
        if base_name in _WEIGHTED and slot.is_quantized(statistics.qparams)
    }


def _split(values: torch.Tensor, rows: int) -> tuple[torch.Tensor, ...]:
    return torch.split(values, rows) if values.dim() else (values,)


def _power(values: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(values, dtype=torch.float64)) ** 2
