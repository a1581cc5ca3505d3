"""The Hessian of a layer's output error, from which its rounding errors are compensated."""

from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import distributed as dist

from inlay.observers.kwargs import Kwarg
from inlay.observers.measuring import MeasuringObserver, Tensors
from inlay.products import product

__all__ = ["HeldOutHessianObserver", "HessianObserver", "whole"]

# Columns whose products with themselves and those before them are computed at once.
_BLOCK = 384
# One of so many tokens is held out.
_HELD_OUT = 8


class HessianObserver(MeasuringObserver):
    """The sum of xᵀx over the tokens of a module's input, in float32.

    For a change ΔW of a weight, tr(ΔW H ΔWᵀ) is the squared error of the output. The sum is plain,
    so that batches, ranks and runs merge by adding, and solvers do not depend on its scale. It is
    symmetric, and complete in its lower triangle only; `whole` gives all of it. It gives no qparams
    and has no name to be chosen by: a recipe with `gptq` asks for it.
    """

    any_format = True
    observes_input = True
    _act_sync_dict = {"hessian": dist.ReduceOp.SUM}
    _kwargs: ClassVar[tuple[Kwarg, ...]] = ()

    def measure(self, observed: torch.Tensor, valid: torch.Tensor | None = None) -> Tensors:
        raise NotImplementedError("a Hessian is that of a module's input")

    def measure_input(self, x: torch.Tensor, valid: torch.Tensor | None = None) -> Tensors:
        columns = _columns(x, valid)
        count = len(columns)
        ends = [min(start + _BLOCK, count) for start in range(0, count, _BLOCK)]
        blocks = [
            product(columns[start:end], columns[:end])
            for start, end in zip([0, *ends], ends, strict=False)
        ]
        padded = [F.pad(block, (0, count - block.shape[1])) for block in blocks[:-1]]
        return {"hessian": torch.cat([*padded, blocks[-1]])}

    @classmethod
    def divide_input(cls, statistics: Mapping[str, torch.Tensor], scales: torch.Tensor) -> Tensors:
        hessian = statistics["hessian"]
        own = scales.to(hessian)
        return {**statistics, "hessian": hessian / own / own.unsqueeze(-1)}


class HeldOutHessianObserver(HessianObserver):
    """The Hessian of the last eighth of the tokens of each value.

    A solver that is given the rest of the Hessian can be judged by these tokens. They are
    consecutive, because neighbouring tokens resemble each other.
    """

    def measure_input(self, x: torch.Tensor, valid: torch.Tensor | None = None) -> Tensors:
        rows = x.reshape(-1, x.size(-1))
        if valid is None:
            return super().measure_input(rows[len(rows) - len(rows) // _HELD_OUT :])
        place = valid.cumsum(0)
        return super().measure_input(rows, valid & (place > place[-1] - place[-1] // _HELD_OUT))


def whole(hessian: torch.Tensor) -> torch.Tensor:
    """Return a symmetric matrix from its lower triangle."""
    return hessian.tril() + hessian.tril(-1).T


def _columns(x: torch.Tensor, valid: torch.Tensor | None) -> torch.Tensor:
    """Return the channels of x in float32, each over all tokens; padding tokens are zero."""
    rows = x.reshape(-1, x.size(-1)).to(torch.float32)
    return (rows if valid is None else torch.where(valid.unsqueeze(-1), rows, 0)).T.contiguous()
