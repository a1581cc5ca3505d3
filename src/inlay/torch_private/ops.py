"""Private parts of torch: ops, and how they are called."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch._ops import HigherOrderOperator, OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "HigherOrderOperator",
    "OpOverload",
    "TorchDispatchMode",
    "is_grouped_product",
    "onednn_linear",
    "set_autocast",
    "set_grad_enabled",
    "without_torch_function",
    "written_arguments",
]


# OpOverload, HigherOrderOperator: the types of ops in exported graphs and of ops that call graphs,
# to ask what they mutate and what they run. torch 2.0; both are in every exported graph, so a
# rename would be announced.
# TorchDispatchMode: to see every op that runs. torch 1.13; it is documented, if not public.


def written_arguments(op: OpOverload) -> list[tuple[int, str]]:
    """The arguments that an op writes to: their positions and names.

    torch 1.13; the schema of an op has no public form.
    """
    return [
        (position, argument.name)
        for position, argument in enumerate(op._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def is_grouped_product(target: Any) -> bool:
    """Whether an op multiplies the rows of each expert by its matrix.

    `torch._grouped_mm` came with torch 2.8 and became `F.grouped_mm` in 2.10; transformers has an
    op of its own for where these do not compile.
    """
    op = target.overloadpacket if isinstance(target, OpOverload) else target
    owners = ((F, "grouped_mm"), (torch, "_grouped_mm"), (torch.ops.aten, "_grouped_mm"))
    known = (getattr(owner, name, None) for owner, name in owners)
    return any(op is each for each in known) or str(op) == "transformers.grouped_mm_fallback"


def onednn_linear(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """`F.linear` by oneDNN, for float32 on a CPU.

    torch 1.13; Inductor puts this op into its code. `F.linear` does the same, and calls MKL.
    """
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(input, weight, bias, "none", [], "")
    return result


def set_grad_enabled() -> Callable[..., Any]:
    """The op that switches gradients in a graph.

    torch 1.11; `torch.set_grad_enabled` is public, and a context, which a graph cannot hold.
    """
    return torch._C._set_grad_enabled


def set_autocast() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The ops that enter and leave autocast in a graph.

    torch 1.13; `torch.autocast` is public, and a context, which a graph cannot hold.
    """
    return torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast


def without_torch_function() -> AbstractContextManager[None]:
    """Call ops without the `TorchFunctionMode` that is on. torch 1.7."""
    context: AbstractContextManager[None] = torch._C.DisableTorchFunction()
    return context
