"""How much of each layer's signal is left above its quantization error."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from inlay.calibration.bindings import Bindings
from inlay.evaluation.measures import chunks
from inlay.nodes.quantize import QuantizeDequantize, fold_weight
from inlay.recipe import Slot
from inlay.report.data import LayerError

__all__ = ["LayerErrors", "Noise", "counted_rows"]

_WEIGHTED = ("weight", "input")


class Noise:
    """The power of a signal and that of its error."""

    def __init__(self) -> None:
        self.signal = 0.0
        self.error = 0.0
        self.is_empty = True

    def add(self, exact: torch.Tensor, quantized: torch.Tensor) -> "Noise":
        exact = exact.float()
        self.signal += _power(exact)
        self.error += _power(quantized.float() - exact)
        self.is_empty = False
        return self

    @property
    def decibels(self) -> float | None:
        """Inf without any error, None where there is nothing to compare or no number to say it."""
        if self.is_empty or not (math.isfinite(self.signal) and math.isfinite(self.error)):
            return None
        if self.error == 0:
            return math.inf if self.signal else None
        return 10 * math.log10(self.signal / self.error) if self.signal else -math.inf


class LayerErrors:
    """SQNR of quantized Linear and Embedding modules.

    Every layer is judged by itself: it is given what the plain model feeds it, once as it is and
    once with weight and input quantized. That its output may be quantized too is not counted.
    """

    def __init__(self, model: nn.Module, bindings: Bindings) -> None:
        self._bindings = bindings
        self._layers = [
            _Layer(name, module, slots)
            for name, module in model.named_modules()
            if (slots := _quantized_slots(bindings, name))
        ]
        self._counted: torch.Tensor | None = None

    @contextmanager
    def watching(self) -> Iterator[Callable[[torch.Tensor | None], None]]:
        """While the model runs in here, its layers are compared.

        :return: call it before each batch, with which positions count, or None for all
        """
        handles = [
            layer.module.register_forward_pre_hook(self._hook(layer), with_kwargs=True)
            for layer in self._layers
            if isinstance(layer.module, nn.Linear)
        ]
        try:
            yield self._count_only
        finally:
            for handle in handles:
                handle.remove()

    def _count_only(self, counted: torch.Tensor | None) -> None:
        self._counted = counted

    def _hook(self, layer: "_Layer") -> Callable[..., None]:
        def compare(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            value = args[0] if args else kwargs["input"]
            layer.compare(self._bindings, value, self._counted)

        return compare

    def results(self) -> tuple[LayerError, ...]:
        """Of all layers in the order of the model; those without data have that of the weight."""
        return tuple(
            LayerError(
                module=layer.name,
                sqnr_db=layer.output.decibels,
                weight_sqnr_db=layer.weight_decibels(self._bindings),
                input_sqnr_db=layer.input.decibels,
            )
            for layer in self._layers
        )


class _Layer:
    def __init__(self, name: str, module: nn.Module, slots: dict[str, Slot]) -> None:
        self.name, self.module, self._slots = name, module, slots
        self.output, self.weight, self.input = Noise(), Noise(), Noise()

    def compare(
        self, bindings: Bindings, value: torch.Tensor, counted: torch.Tensor | None
    ) -> None:
        assert isinstance(self.module, nn.Linear)
        quantized = value
        if "input" in self._slots:
            # Before rows are left out: dynamic scales are those of the value as a whole.
            quantized = _quantize(bindings, self._slots["input"], value)
        rows = counted_rows(value, counted)
        value, quantized = (v.flatten(0, -2)[rows].float() for v in (value, quantized))
        if "input" in self._slots:
            self.input.add(value, quantized)
        bias = None if self.module.bias is None else self.module.bias.detach().float()
        weight = folded = self.module.weight.detach().float()
        if "weight" in self._slots:
            folded = bindings.quantized_value(self._slots["weight"], "folded").float()
            if self.weight.is_empty:  # it is the same for every batch
                self.weight.add(weight, folded)
        for part in chunks(len(value), len(weight)):
            self.output.add(
                F.linear(value[part], weight, bias), F.linear(quantized[part], folded, bias)
            )

    def weight_decibels(self, bindings: Bindings) -> float | None:
        slot = self._slots.get("weight")
        if slot is not None and self.weight.is_empty:
            weight = self.module.weight
            assert isinstance(weight, torch.Tensor)
            assert bindings.statistics.qparams is not None
            # Not kept: all weights twice would not fit where the model barely does.
            folded = fold_weight(weight, slot.args, bindings.statistics.qparams[slot.name])
            self.weight.add(weight.detach(), folded)
        return self.weight.decibels


def counted_rows(value: torch.Tensor, counted: torch.Tensor | None) -> slice | torch.Tensor:
    """Which rows of a value count, where its rows are the positions that `counted` speaks of.

    Tokens that were sent to an expert, say, have lost their places and all count.
    """
    if counted is None:
        return slice(None)
    is_flat = value.dim() == 2 and len(value) == counted.numel()
    if is_flat or value.shape[:-1] == counted.shape:
        return counted.flatten()
    return slice(None)


def _quantized_slots(bindings: Bindings, module: str) -> dict[str, Slot]:
    """Slots of weight and input that the finalized model quantizes."""
    statistics = bindings.statistics
    assert statistics.qparams is not None
    return {
        base_name: slot
        for base_name, slot in statistics.plan.of_module(module).items()
        if base_name in _WEIGHTED and slot.is_quantized(statistics.qparams)
    }


def _quantize(bindings: Bindings, slot: Slot, value: torch.Tensor) -> torch.Tensor:
    """The value as the finalized graph quantizes it."""
    if not slot.is_observed:
        return QuantizeDequantize(slot.args, ())(value)
    assert bindings.statistics.qparams is not None
    known = bindings.statistics.qparams[slot.name]
    given = {key: known.get(key) for key in slot.used_qparams}
    tensors = {key: tensor for key, tensor in given.items() if isinstance(tensor, torch.Tensor)}
    return QuantizeDequantize(slot.args, tuple(tensors))(value, *tensors.values())


def _power(values: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(values, dtype=torch.float64)) ** 2
