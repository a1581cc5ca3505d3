"""The Hessian of a layer's output error, from which its rounding errors are compensated."""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import distributed as dist

from inlay.observers.kwargs import Kwarg
from inlay.observers.measuring import MeasuringObserver, Tensors
from inlay.products import product

__all__ = ["HessianObserver"]


class HessianObserver(MeasuringObserver):
    """The sum of xᵀx over the tokens of a module's input, in float32.

    For a change ΔW of a weight, tr(ΔW H ΔWᵀ) is the squared error of the output. The sum is plain,
    so that batches, ranks and runs merge by adding, and solvers do not depend on its scale. It
    gives no qparams and has no name to be chosen by: a recipe with `gptq` asks for it.
    """

    any_format = True
    observes_input = True
    _act_sync_dict = {"hessian": dist.ReduceOp.SUM}
    _kwargs: ClassVar[tuple[Kwarg, ...]] = ()

    def measure(self, observed: torch.Tensor, valid: torch.Tensor | None = None) -> Tensors:
        raise NotImplementedError("a Hessian is that of a module's input")

    def measure_input(self, x: torch.Tensor, valid: torch.Tensor | None = None) -> Tensors:
        columns = _columns(x, valid)
        return {"hessian": product(columns, columns)}

    @classmethod
    def divide_input(cls, statistics: Mapping[str, torch.Tensor], scales: torch.Tensor) -> Tensors:
        hessian = statistics["hessian"]
        own = scales.to(hessian)
        return {**statistics, "hessian": hessian / own / own.unsqueeze(-1)}


def _columns(x: torch.Tensor, valid: torch.Tensor | None) -> torch.Tensor:
    """Return the channels of x in float32, each over all tokens; padding tokens are zero."""
    rows = x.reshape(-1, x.size(-1)).to(torch.float32)
    return (rows if valid is None else torch.where(valid.unsqueeze(-1), rows, 0)).T
