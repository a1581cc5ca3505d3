"""Nodes that compare a layer with its quantized self, while the plain model runs."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby

import torch

from inlay.model import Weight
from inlay.nodes.quantize import QuantizeDequantize
from inlay.nodes.routing import row_groups, valid_rows
from inlay.products import product

__all__ = ["POWERS", "CompareLayer"]

# What a compare node sums up: powers of signals and of their errors, and rows compared.
POWERS = ("output", "output error", "input", "input error", "rows")
# Numbers compared at a time: 64 MB in float32.
_CHUNK = 1 << 24


@dataclass(frozen=True)
class CompareLayer:
    """The callable of a compare node: adds the powers of a layer's signal and error to sums.

    It feeds the layer what the plain model feeds it, with input and weight quantized. Its arguments
    are the input, the output, the parameter with the weights, the same folded, the sums of each
    weight in the order of `POWERS`, and the qparams of the input. A batch with padding adds a mask
    in the layout of the input. If the rows of the input stand in groups, one for each matrix of a
    stack, more arguments tell where the rows of each group end and which token each row is of.

    :param weights: the weights of the parameter, without names, which blocks do not share
    :param quantize: how the input is quantized; None if it is not
    :param is_product: whether the output is the product in float32, without a bias or rounding
    """

    weights: tuple[Weight, ...]
    quantize: QuantizeDequantize | None
    is_product: bool = False
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
        ends: torch.Tensor | None = None,
        token_of_row: torch.Tensor | None = None,
    ) -> None:
        # The whole value, before rows are left out: dynamic scales may depend on all of it.
        quantized = value if self.quantize is None else self.quantize(value, *qparams, ends=ends)
        if ends is not None:
            valid = valid_rows(mask, token_of_row)
        else:
            valid = None if mask is None else mask.expand(value.shape[:-1]).flatten()
        of_weight = iter(zip(self.weights, sums, strict=True))
        by_index = groupby(of_weight, lambda each: each[0].index)
        for rows, (_, own) in zip(row_groups(ends, valid), by_index, strict=True):
            given = _picked(value, rows)
            given_quantized = given if self.quantize is None else _picked(quantized, rows)
            found = output.flatten(0, -2)[rows]
            for view, powers in own:
                matrices = view.read(weight), view.read(folded)
                out = view.outputs_of(found)
                _add_powers(powers, given, given_quantized, out, *matrices, self.is_product)


def _add_powers(
    sums: torch.Tensor,
    value: torch.Tensor,
    quantized: torch.Tensor,
    output: torch.Tensor,
    weight: torch.Tensor,
    folded: torch.Tensor,
    is_product: bool,
) -> None:
    """Add the powers of some rows to the sums of a layer.

    :param value: rows of the input, in float32
    :param quantized: the same quantized, or the same tensor if the input is not
    :param folded: the quantized weight, or the same tensor if the weight is not
    :param is_product: see `CompareLayer`
    """
    if quantized is not value:
        sums[2] += _power(value)
        sums[3] += _power(quantized - value)
    sums[4] += len(value)
    wide = weight.float()
    is_same = folded.data_ptr() == weight.data_ptr()
    exact = output if is_product else None
    error = _error_of(value, quantized, wide, wide if is_same else folded.float(), exact)
    step = max(1, _CHUNK // len(weight))
    for start in range(0, len(value), step):
        part = slice(start, start + step)
        sums[0] += _power(output[part].float())
        sums[1] += _power(error(part))


def _picked(value: torch.Tensor, rows: slice | torch.Tensor) -> torch.Tensor:
    return value.flatten(0, -2)[rows].float()


def _error_of(
    value: torch.Tensor,
    quantized: torch.Tensor,
    weight: torch.Tensor,
    folded: torch.Tensor,
    exact: torch.Tensor | None,
) -> Callable[[slice], torch.Tensor]:
    """Return a function that computes the error of a layer's output, for some rows of its input.

    The bias is in both outputs, so it is no part of the error. Where only one operand is quantized
    the error is a single product, and exact also where the outputs are large beside it.

    :param exact: the product of value and weight, if it is known
    """
    if quantized is value:
        difference = folded - weight
        return lambda rows: product(value[rows], difference)
    if folded is weight:
        return lambda rows: product(quantized[rows] - value[rows], weight)
    if exact is not None:
        return lambda rows: product(quantized[rows], folded) - exact[rows]
    return lambda rows: product(quantized[rows], folded) - product(value[rows], weight)


def _power(values: torch.Tensor) -> torch.Tensor:
    norm: torch.Tensor = torch.linalg.vector_norm(values, dtype=torch.float64)
    return norm.square()
