"""GPTQ: round a weight column by column, and let later columns absorb the error of earlier ones."""

from dataclasses import dataclass

import torch

from inlay.compensation.factor import Factors, factorize
from inlay.compensation.grid import Grid
from inlay.products import product

__all__ = ["Compensated", "compensate", "output_errors"]

# Columns rounded before their errors reach the other columns in one product.
_BLOCK = 64


@dataclass(frozen=True, kw_only=True)
class Compensated:
    """Weights on their grid, with the output error before and after compensation.

    Errors are δ H δᵀ for each row δ of ΔW: squared errors of one output, summed over tokens.

    :param weights: of shape (batch, rows, columns)
    :param signal: squared outputs of the plain weights, of shape (batch, rows)
    :param before: errors of round-to-nearest, of shape (batch, rows)
    :param after: errors of these weights, of shape (batch, rows); never larger
    :param damping: the damping each layer needed, of shape (batch,)
    :param failed: whether the Hessian of a layer cannot be factorized, of shape (batch,); such
        weights are rounded to nearest
    """

    weights: torch.Tensor
    signal: torch.Tensor
    before: torch.Tensor
    after: torch.Tensor
    damping: torch.Tensor
    failed: torch.Tensor


@torch.no_grad()
def compensate(
    weights: torch.Tensor, hessians: torch.Tensor, grid: Grid, *, damping: float | torch.Tensor
) -> Compensated:
    """Round a batch of weights of one shape so that the errors of their outputs are small.

    Columns are rounded in the order of falling input energy (static activation order); the grid
    stays that of the original order. GPTQ is greedy and loses on some rows. Rows are independent,
    so each keeps the better of GPTQ and round-to-nearest.

    :param weights: of shape (batch, rows, columns)
    :param hessians: sums of xᵀx over tokens, of shape (batch, columns, columns)
    :param damping: added to the diagonal of a Hessian, relative to its mean; one, or one per layer
    """
    wide = weights.detach().to(torch.float32)
    hessians = hessians.to(torch.float32)
    energy = torch.diagonal(hessians, dim1=-2, dim2=-1)
    # Reversed, because the columns are rounded from the last to the first.
    order = torch.argsort(energy, dim=-1, descending=True, stable=True).flip(-1)
    factors = factorize(_reordered(hessians, order), damping)
    columns = torch.stack([w.T.index_select(0, own) for w, own in zip(wide, order, strict=True)])
    found = _solved(columns, factors, grid.reordered(order))
    back = torch.argsort(order, dim=-1)
    solved = torch.stack([w.index_select(0, own).T for w, own in zip(found, back, strict=True)])
    nearest = grid.rounded(wide.transpose(1, 2), slice(None)).transpose(1, 2)
    before = output_errors(nearest - wide, hessians)
    after = output_errors(solved - wide, hessians)
    # A NaN never compares as better, so rows that went wrong are rounded to nearest too.
    is_better = (after < before) & ~factors.failed.unsqueeze(-1)
    return Compensated(
        weights=torch.where(is_better.unsqueeze(-1), solved, nearest)
        .to(weights.dtype)
        .contiguous(),  # columns stand before rows so far
        signal=output_errors(wide, hessians),
        before=before,
        after=torch.where(is_better, after, before),
        damping=factors.damping,
        failed=factors.failed,
    )


def output_errors(difference: torch.Tensor, hessians: torch.Tensor) -> torch.Tensor:
    """Return the squared error of each row's output, of shape (batch, rows).

    :param difference: of weights, of shape (batch, rows, columns)
    """
    pairs = zip(difference, hessians, strict=True)
    return torch.stack([(product(own, hessian) * own).sum(-1) for own, hessian in pairs])


def _reordered(hessians: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Return symmetric matrices with rows and columns in another order."""
    pairs = zip(hessians, order, strict=True)
    # Rows are copied much faster than columns.
    return torch.stack(
        [hessian.index_select(0, own).T.contiguous().index_select(0, own) for hessian, own in pairs]
    )


def _solved(columns: torch.Tensor, factors: Factors, grid: Grid) -> torch.Tensor:
    """Round columns one by one, from the last to the first.

    :param columns: of shape (batch, columns, rows), so that each column is contiguous; overwritten
    """
    lower = factors.lower
    diagonal = torch.diagonal(lower, dim1=-2, dim2=-1)
    result = torch.empty_like(columns)
    for end in range(columns.shape[1], 0, -_BLOCK):
        start = max(0, end - _BLOCK)
        errors = torch.empty_like(columns[:, start:end])
        for index in reversed(range(start, end)):
            value, later = columns[:, index], index + 1
            if later < end:  # the errors of this block so far, in one product
                known = lower[:, later:end, index].unsqueeze(1)
                value = value - torch.bmm(known, errors[:, later - start :]).squeeze(1)
            rounded = grid.rounded(value, index)
            result[:, index] = rounded
            errors[:, index - start] = (value - rounded) / diagonal[:, index].unsqueeze(-1)
        if start:
            for own, factor, error in zip(columns, lower, errors, strict=True):
                own[:start] -= product(factor[start:end, :start].T, error.T)
    return result
