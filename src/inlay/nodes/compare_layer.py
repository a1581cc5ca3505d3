"""Nodes that compare a layer with its quantized self, while the plain model runs."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from inlay.nodes.quantize import QuantizeDequantize

__all__ = ["POWERS", "CompareLayer", "add_powers"]

# What a compare node sums up: powers of signals and of their errors, and rows compared.
POWERS = ("output", "output error", "input", "input error", "rows")
# Numbers compared at a time: 64 MB in float32.
_CHUNK = 1 << 24


@dataclass(frozen=True)
class CompareLayer:
    """The callable of a compare node: adds the powers of a layer's signal and error to sums.

    It feeds the layer what the plain model feeds it, with input and weight quantized. Its arguments
    are the input, the output, the weight, the folded weight, the sums in the order of `POWERS`, and
    the qparams of the input. A batch with padding adds a mask in the layout of the input.

    :param quantize: how the input is quantized; None if it is not
    """

    quantize: QuantizeDequantize | None
    __name__ = "compare_layer"

    @torch.no_grad()
    def __call__(
        self,
        value: torch.Tensor,
        output: torch.Tensor,
        weight: torch.Tensor,
        folded: torch.Tensor,
        sums: torch.Tensor,
        *qparams: torch.Tensor,
        mask: torch.Tensor | None = None,
    ) -> None:
        # The whole value, before rows are left out: dynamic scales may depend on all of it.
        quantized = value if self.quantize is None else self.quantize(value, *qparams)
        rows = slice(None) if mask is None else mask.expand(value.shape[:-1]).flatten()
        value, output = _picked(value, rows), _picked(output, rows)
        quantized = value if self.quantize is None else _picked(quantized, rows)
        add_powers(sums, value, quantized, output, weight, folded)


def add_powers(
    sums: torch.Tensor,
    value: torch.Tensor,
    quantized: torch.Tensor,
    output: torch.Tensor,
    weight: torch.Tensor,
    folded: torch.Tensor,
) -> None:
    """Add the powers of some rows to the sums of a layer.

    :param value: rows of the input, in float32
    :param quantized: the same quantized, or the same tensor if the input is not
    :param folded: the quantized weight, or the same tensor if the weight is not
    """
    if quantized is not value:
        sums[2] += _power(value)
        sums[3] += _power(quantized - value)
    sums[4] += len(value)
    wide = weight.float()
    error = _error_of(value, quantized, wide, wide if folded is weight else folded.float())
    step = max(1, _CHUNK // len(weight))
    for start in range(0, len(value), step):
        part = slice(start, start + step)
        sums[0] += _power(output[part].float())
        sums[1] += _power(error(part))


def _picked(value: torch.Tensor, rows: slice | torch.Tensor) -> torch.Tensor:
    return value.flatten(0, -2)[rows].float()


def _error_of(
    value: torch.Tensor, quantized: torch.Tensor, weight: torch.Tensor, folded: torch.Tensor
) -> Callable[[slice], torch.Tensor]:
    """Return a function that computes the error of a layer's output, for some rows of its input.

    The bias is in both outputs, so it is no part of the error. Where only one operand is quantized
    the error is a single product, and exact also where the outputs are large beside it.
    """
    if quantized is value:
        difference = folded - weight
        return lambda rows: F.linear(value[rows], difference)
    if folded is weight:
        return lambda rows: F.linear(quantized[rows] - value[rows], weight)
    return lambda rows: F.linear(quantized[rows], folded) - F.linear(value[rows], weight)


def _power(values: torch.Tensor) -> torch.Tensor:
    norm: torch.Tensor = torch.linalg.vector_norm(values, dtype=torch.float64)
    return norm.square()
