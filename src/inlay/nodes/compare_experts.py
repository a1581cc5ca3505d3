"""Nodes that compare the layers of each expert with their quantized selves."""

from dataclasses import dataclass

import torch

from inlay.nodes.compare_layer import BatchMask, add_powers
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
        batch: BatchMask,
        *qparams: torch.Tensor,
        ends: torch.Tensor,
        token_of_row: torch.Tensor | None,
    ) -> None:
        quantized = value if self.quantize is None else self.quantize(value, *qparams, ends=ends)
        counted = _counted_rows(batch.mask, token_of_row)
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


def _counted_rows(
    mask: torch.Tensor | None, token_of_row: torch.Tensor | None
) -> torch.Tensor | None:
    """Tell of each row whether it counts; None if all do, as where the mask is of other tokens."""
    if mask is None or token_of_row is None or not len(token_of_row):
        return None
    # Every token goes to some expert, so the last one tells how many there are.
    is_of_tokens = int(token_of_row.max()) + 1 == mask.numel()
    return rows_that_count(mask, token_of_row) if is_of_tokens else None
