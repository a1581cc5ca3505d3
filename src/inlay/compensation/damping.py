"""Choose the damping of Hessians by the errors of outputs for held-out tokens."""

import torch

from inlay.compensation.gptq import compensate, output_errors
from inlay.compensation.grid import Grid
from inlay.compensation.settings import DEFAULT_DAMPING

__all__ = ["choose_damping"]

# The default is tried first: among equal errors, the first wins.
_CANDIDATES = (DEFAULT_DAMPING, 0.01, 0.02, 0.1, 0.2)


@torch.no_grad()
def choose_damping(
    weights: torch.Tensor, hessians: torch.Tensor, held_out: torch.Tensor, grid: Grid
) -> torch.Tensor:
    """Return the damping of each layer, of shape (batch,), with the smallest held-out error.

    Every candidate compensates the weights for the other tokens, and is judged by those held out.

    :param weights: of shape (batch, rows, columns)
    :param hessians: of all tokens, of shape (batch, columns, columns)
    :param held_out: of the held-out tokens alone, of the same shape
    """
    known, wide = hessians - held_out, weights.detach().to(torch.float32)
    errors = []
    for damping in _CANDIDATES:
        found = compensate(weights, known, grid, damping=damping).weights
        errors.append(output_errors(found.to(torch.float32) - wide, held_out).sum(-1))
    best = torch.stack(errors).argmin(0)
    return torch.tensor(_CANDIDATES, dtype=torch.float32, device=weights.device)[best]
