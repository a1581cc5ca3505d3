"""torchao's flow for x86: export, observe, convert, and compile with frozen weights."""

import importlib
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

# Beside the pinned packages, which it must not change.
FOLDER = Path("build/benchmarks/torchao")
VERSION = "0.18.0"


class Positional(nn.Module):
    """A model whose inputs are positional and whose outputs are a tuple."""

    def __init__(self, model: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found: tuple[torch.Tensor, ...] = self.model(
            **dict(zip(self.names, values, strict=True))
        ).to_tuple()
        return found


def by_torchao(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> Callable[..., Any]:
    """Quantize a model with static int8 inputs, calibrated on one batch, and compile it.

    :return: takes the inputs by name
    """
    _install()
    import torch._inductor.config as inductor
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

    values = tuple(batch.values())
    exported = torch.export.export(Positional(model, tuple(batch)), values).module()
    quantizer = x86.X86InductorQuantizer()
    quantizer.set_global(x86.get_default_x86_inductor_quantization_config())
    prepared = prepare_pt2e(exported, quantizer)
    prepared(*values)
    compiled = torch.compile(convert_pt2e(prepared))

    def run(**given: torch.Tensor) -> Any:
        with inductor.patch(freezing=True):
            return compiled(*given.values())

    return run


def _install() -> None:
    if not FOLDER.exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        subprocess.run([*pip, "--target", str(FOLDER), f"torchao=={VERSION}"], check=True)
    sys.path.append(str(FOLDER.resolve()))
    importlib.invalidate_caches()
