"""Whether statistics and outputs are the same, and how to say that they are not."""

import torch
from torch import nn

from inlay.errors import CheckError
from inlay.evaluation.traced import differ_by, tensors_in
from inlay.observers import Observer
from inlay.reductions import MAXIMUM, MINIMUM, reduction_of
from inlay.statistics.functional import tensors_of

__all__ = [
    "CLOSE",
    "differ_by",
    "require_close",
    "require_statistics",
    "rounding_of",
    "tensors_in",
]

CLOSE = 1e-3  # of the norm of outputs, where a compiler or a dtype may round


def rounding_of(model: nn.Module) -> float:
    """How far numbers of the model may differ, relatively, if they are summed in another order."""
    dtypes = {p.dtype for p in model.parameters() if p.dtype.is_floating_point}
    return max((8 * torch.finfo(dtype).eps for dtype in dtypes), default=0.0)


def require_statistics(
    name: str,
    found: Observer,
    expected: Observer,
    tolerance: float,
    *,
    by: str = "by hooks",
    exact_extremes: bool = False,
) -> None:
    """Raise unless two observers of a slot have the same statistics.

    :param exact_extremes: whether the tolerance is not for what merges as MIN or MAX
    """
    declared = type(found)._act_sync_dict
    for key, other in tensors_of(expected).items():
        own = getattr(found, key)
        extreme = key in declared and reduction_of(declared[key], key) in (MINIMUM, MAXIMUM)
        far = 0.0 if exact_extremes and extreme else tolerance
        if far and not other.is_floating_point():
            # Counts of values: rounding moves some from one bin to the next.
            own, other = own.sum(-1), other.sum(-1)
        if not _agree(own.double(), other.double(), far):
            raise CheckError(
                f"{key} of {name} is {_short(own)} in the graph and {_short(other)} {by}"
            )


def require_close(
    what: str,
    found: list[torch.Tensor],
    expected: list[torch.Tensor],
    by: str = "the finalized graph",
    close: float = CLOSE,
) -> None:
    """Raise unless outputs are the same, up to a part of their norm."""
    if len(found) != len(expected):
        raise CheckError(f"{what} returns {len(expected)} tensors, and {by} {len(found)}")
    for one, other in zip(found, expected, strict=True):
        error = differ_by(one, other)
        if not error <= close:
            raise CheckError(f"{what} and {by} differ by {error:.2g} of the output's norm")


def _agree(one: torch.Tensor, other: torch.Tensor, tolerance: float) -> bool:
    if one.shape != other.shape:
        return False
    scale = float(other.abs().max()) if other.numel() else 0.0
    return bool(torch.allclose(one, other, tolerance, tolerance * scale))


def _short(tensor: torch.Tensor) -> str:
    numbers = [f"{number:.6g}" for number in tensor.double().flatten()[:3].tolist()]
    return ", ".join(numbers) + (", …" if tensor.numel() > 3 else "")
