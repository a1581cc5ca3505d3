"""A linear layer whose product is left to oneDNN, and whether that pays on this machine."""

import time
from functools import cache

import torch
import torch.nn.functional as F

from inlay.torch_private import onednn_linear

__all__ = ["fast_linear", "onednn_is_faster"]

_ROUNDS = 5
# By how much oneDNN has to be faster. Where both take their best code they are about as fast, and
# noise must not decide which bits a run gets.
_MARGIN = 1.25


def fast_linear(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Do what `F.linear` does, up to rounding, by oneDNN where that is possible.

    oneDNN's op knows neither gradients nor autocast nor empty values.
    """
    is_differentiated = torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in (input, weight, bias)
    )
    if is_differentiated or input.ndim < 2 or 0 in input.shape or torch.is_autocast_enabled("cpu"):
        return F.linear(input, weight, bias)
    return onednn_linear(input, weight, bias)


@cache
def onednn_is_faster() -> bool:
    """Whether oneDNN multiplies float32 matrices faster than torch does, by trying both once.

    torch calls MKL. On an AMD processor with AVX-512 oneDNN was twice as fast.
    """
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    value, weight = torch.ones(256, 512), torch.ones(512, 512)
    taken = {F.linear: float("inf"), onednn_linear: float("inf")}
    with torch.no_grad():
        for _ in range(_ROUNDS):
            for product in taken:
                start = time.perf_counter()
                product(value, weight, None)
                taken[product] = min(taken[product], time.perf_counter() - start)
    return taken[onednn_linear] * _MARGIN < taken[F.linear]
