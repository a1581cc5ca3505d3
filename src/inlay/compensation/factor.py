"""The triangular factor that tells how much of a column's error other columns can absorb."""

from dataclasses import dataclass

import torch

from inlay.products import product

__all__ = ["Factors", "factorize"]

# Each retry multiplies the damping by this. With the last one the diagonal dominates, so only a
# Hessian with NaN, Inf or a strongly negative eigenvalue still fails.
_MORE_DAMPING = 10.0
_RETRIES = 4
# Columns factorized by LAPACK. Larger Hessians are divided, so that products do most of the work.
_LEAF = 256


@dataclass(frozen=True, kw_only=True)
class Factors:
    """Lower triangular R of a batch of Hessians, with RᵀR the inverse of the damped Hessian.

    :param lower: of shape (batch, columns, columns)
    :param damping: the damping each Hessian needed, of shape (batch,)
    :param failed: whether no damping made a Hessian positive definite, of shape (batch,)
    """

    lower: torch.Tensor
    damping: torch.Tensor
    failed: torch.Tensor


def factorize(hessians: torch.Tensor, damping: float | torch.Tensor) -> Factors:
    """Damp and factorize a batch of Hessians, with more damping for those that fail.

    R is the inverse of the Cholesky factor. The inverse of the Hessian is never formed, which would
    lose precision.

    :param hessians: of shape (batch, columns, columns), symmetric and positive semidefinite
    :param damping: added to the diagonal, relative to its mean; one for all or one each
    """
    mean = torch.diagonal(hessians, dim1=-2, dim2=-1).mean(-1)
    # An input that is always zero has no curvature at all; one makes damping meaningful.
    mean = torch.where(mean > 0, mean, torch.ones_like(mean))
    used = torch.zeros_like(mean) + damping
    lower = torch.empty_like(hessians)
    failed = torch.zeros(len(hessians), dtype=torch.bool, device=hessians.device)
    for number, hessian in enumerate(hessians):
        for _ in range(_RETRIES + 1):
            damped = hessian.clone()
            damped.diagonal().add_(used[number] * mean[number])
            found = _inverse_factor(damped)
            if bool(torch.isfinite(found).all() & torch.isfinite(mean[number])):
                lower[number] = found
                break
            used[number] = (used[number] * _MORE_DAMPING).clamp(min=1e-3)
        else:
            failed[number] = True
            lower[number] = torch.eye(hessians.shape[-1], dtype=lower.dtype, device=lower.device)
    return Factors(lower=lower, damping=used, failed=failed)


def _inverse_factor(hessian: torch.Tensor) -> torch.Tensor:
    """Return the inverse of the Cholesky factor; NaN if the Hessian is not positive definite."""
    columns = len(hessian)
    if columns <= _LEAF:
        lower, info = torch.linalg.cholesky_ex(hessian)
        if int(info):
            return torch.full_like(hessian, torch.nan)
        identity = torch.eye(columns, dtype=hessian.dtype, device=hessian.device)
        inverse: torch.Tensor = torch.linalg.solve_triangular(lower, identity, upper=False)
        return inverse
    half = columns // 2
    first = _inverse_factor(hessian[:half, :half])
    below = product(hessian[half:, :half], first)
    second = _inverse_factor(hessian[half:, half:] - product(below, below))
    result = torch.zeros_like(hessian)
    result[:half, :half], result[half:, half:] = first, second
    result[half:, :half] = product(product(second, below.T), first.T).neg_()
    return result
