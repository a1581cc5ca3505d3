"""The triangular factor that tells how much of a column's error the later columns can absorb."""

from dataclasses import dataclass

import torch

__all__ = ["Factors", "factorize"]

# Each retry multiplies the damping by this. With the last one the diagonal dominates, so only a
# Hessian with NaN, Inf or a strongly negative eigenvalue still fails.
_MORE_DAMPING = 10.0
_RETRIES = 4


@dataclass(frozen=True, kw_only=True)
class Factors:
    """Upper triangular R of a batch of Hessians, with RᵀR the inverse of the damped Hessian.

    :param upper: of shape (batch, columns, columns)
    :param damping: the damping each Hessian needed, of shape (batch,)
    :param failed: whether no damping made a Hessian positive definite, of shape (batch,)
    """

    upper: torch.Tensor
    damping: torch.Tensor
    failed: torch.Tensor


def factorize(hessians: torch.Tensor, damping: float) -> Factors:
    """Damp and factorize a batch of Hessians, with more damping for those that fail.

    Reversed in rows and columns, a Hessian has the Cholesky factor L, and the reversed inverse of L
    is R. That takes one Cholesky factorization and one triangular solve, and never forms the
    inverse of the Hessian, which would lose precision.

    :param hessians: of shape (batch, columns, columns), symmetric and positive semidefinite
    :param damping: added to the diagonal, relative to its mean
    """
    columns = hessians.shape[-1]
    diagonal = torch.diagonal(hessians, dim1=-2, dim2=-1)
    # An input that is always zero has no curvature at all; one makes damping meaningful.
    mean = diagonal.mean(-1)
    mean = torch.where(mean > 0, mean, torch.ones_like(mean))
    used = torch.full_like(mean, damping)
    lower, info = _cholesky(hessians, used * mean)
    for _ in range(_RETRIES):
        bad = info != 0
        if not bool(bad.any()):
            break
        used = torch.where(bad, (used * _MORE_DAMPING).clamp(min=1e-3), used)
        again, info_again = _cholesky(hessians[bad], (used * mean)[bad])
        lower[bad], info = again, info.masked_scatter(bad, info_again)
    failed = info != 0
    identity = torch.eye(columns, dtype=hessians.dtype, device=hessians.device)
    lower = torch.where(failed[:, None, None], identity, lower)
    inverse = torch.linalg.solve_triangular(lower, identity.expand_as(lower), upper=False)
    return Factors(upper=inverse.flip(-1, -2), damping=used, failed=failed)


def _cholesky(hessians: torch.Tensor, damping: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    reversed_ = hessians.flip(-1, -2)  # a copy, so that damping it changes nothing else
    torch.diagonal(reversed_, dim1=-2, dim2=-1).add_(damping.unsqueeze(-1))
    lower, info = torch.linalg.cholesky_ex(reversed_)
    finite = torch.isfinite(lower).flatten(1).all(-1)
    return lower, torch.where(finite, info, torch.ones_like(info))
