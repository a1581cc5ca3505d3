"""A linear layer whose product is left to oneDNN, and whether that pays on this machine."""

import platform
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F

from inlay.torch_private import onednn_linear

__all__ = ["fast_linear", "onednn_is_faster"]


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
    """Return whether oneDNN multiplies float32 matrices faster than MKL, which torch calls.

    It is looked up, not measured: a timing would make the bits of a run depend on the load of the
    machine. MKL takes its AVX-512 code on Intel processors only. On an AMD processor with AVX-512,
    oneDNN was 2.1 to 2.7 times as fast for three shapes (medians of 40 runs).
    """
    return (
        torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and "AuthenticAMD" in _processor()
    )


def _processor() -> str:
    """Return what the system says about the processor, with its vendor."""
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0]
    except OSError:
        return platform.processor()  # Windows
