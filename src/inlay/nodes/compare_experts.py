"""Nodes that compare the layers of each expert with their quantized selves."""

from dataclasses import dataclass

import torch

from inlay.nodes.compare_layer import add_powers
from inlay.nodes.experts import QuantizeExperts
from inlay.nodes.routing import rows_that_count

__all__ = ["CompareExperts"]


@dataclass(frozen=True)
class CompareExperts:
    """The callable of a compare node on a product with the weights of many experts.

    Its arguments are those of `CompareLayer`, with weights and sums of all experts along a first
    dimension, and the nodes that say whose rows are whose and which tokens they are.

    :param quantize: how the input is quantized; None if it is not
    """

    quantize: QuantizeExperts | None
    __name__ = "compare_experts"

    @torch.no_grad()
    def __call__(
        self,
        value: torch.Tensor,
        output: torch.Tensor,
        weights: torch.Tensor,
        folded: torch.Tensor,
        sums: torch.Tensor,
        *qparams: torch.Tensor,
        ends: torch.Tensor,
        token_of_row: torch.Tensor | None,
        mask: torch.Tensor | None = None,
    ) -> None:
        quantized = value if self.quantize is None else self.quantize(value, *qparams, ends=ends)
        counted = rows_that_count(mask, token_of_row)
        parts = len(sums) // len(weights)
        of_parts = iter(sums)  # expert by expert, as the members of a parameter are listed
        start = 0
        for number, end in enumerate(ends.tolist()):
            rows: slice | torch.Tensor = slice(start, end)
            if counted is not None:
                rows = start + counted[start:end].nonzero().flatten()
            start = end
            own = value[rows].float()
            own_quantized = own if quantized is value else quantized[rows].float()
            # Projections that read the same value stand one after another in the rows of a weight.
            for weight, fold, out in zip(
                weights[number].chunk(parts),
                folded[number].chunk(parts),
                output[rows].chunk(parts, -1),
                strict=True,
            ):
                add_powers(next(of_parts), own, own_quantized, out, weight, fold)
