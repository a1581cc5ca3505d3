"""Private parts of torch: ops, and how they are called."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.utils._python_dispatch import TorchDispatchMode

from inlay.transformers_private import GROUPED_PRODUCT

__all__ = [
    "HigherOrderOperator",
    "OpOverload",
    "OpOverloadPacket",
    "TorchDispatchMode",
    "aten_name",
    "float8_product",
    "has_float8_product",
    "has_integer_product",
    "has_weight_products",
    "int4_packed",
    "int4_packed_product",
    "int8_weight_product",
    "integer_product",
    "is_grouped_product",
    "onednn_linear",
    "set_autocast",
    "set_grad_enabled",
    "without_torch_function",
    "written_operands",
]


# OpOverload, OpOverloadPacket, HigherOrderOperator: types of ops in exported graphs, of ops that
# stand for all overloads, and of ops that call graphs, to ask what they mutate and what they run.
# torch 2.0; they are in every exported graph, so a rename would be announced.
# TorchDispatchMode: to see every op that runs. torch 1.13; it is documented, if not public.


def aten_name(op: OpOverload | OpOverloadPacket) -> str | None:
    """Return the name of an op of ATen without its overload; None for any other op.

    torch 2.0; the name of a packet has no public form with its namespace.
    """
    packet = op.overloadpacket if isinstance(op, OpOverload) else op
    namespace, _, name = packet._qualified_op_name.partition("::")
    return name if namespace == "aten" else None


def written_operands(
    op: OpOverload | OpOverloadPacket, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[Any]:
    """Return the operands that a call of an op writes to; of a packet, by any of its overloads.

    torch 1.13; the schema of an op has no public form.
    """
    overloads: list[Any] = [op]
    if isinstance(op, OpOverloadPacket):
        names: list[str] = op.overloads()  # type: ignore[no-untyped-call]
        overloads = [getattr(op, name) for name in names]
    found = []
    for overload in overloads:
        for position, argument in enumerate(overload._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            if argument.name in kwargs:
                found.append(kwargs[argument.name])
            elif position < len(args) and not argument.kwarg_only:
                found.append(args[position])
    return found


def is_grouped_product(target: Any) -> bool:
    """Whether an op multiplies each group of rows by a matrix of its own.

    torch 2.10; `F.grouped_mm` is public, and exported graphs have the op behind it. transformers
    has an op of its own for where these do not compile.
    """
    op = target.overloadpacket if isinstance(target, OpOverload) else target
    known = (F.grouped_mm, torch._grouped_mm, torch.ops.aten._grouped_mm)
    return any(op is each for each in known) or str(op) == GROUPED_PRODUCT


def onednn_linear(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """`F.linear` by oneDNN, for float32 on a CPU.

    torch 1.13; Inductor puts this op into its code. `F.linear` does the same, and calls MKL.
    """
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(input, weight, bias, "none", [], "")
    return result


def has_integer_product() -> bool:
    """Return whether torch can multiply int8 matrices into int32. torch 2.0."""
    return hasattr(torch, "_int_mm")


_FEWEST_ROWS = 17  # that the op takes with CUDA


def integer_product(value: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply int8 values by an int8 weight into int32, exactly, as `F.linear` does.

    The op reads wrong memory if a single row has another stride than its length, which neither
    `reshape` nor `contiguous` guarantees. For a single column it returns wrong numbers.

    torch 2.0; public ops for quantized tensors want weights packed for one processor.

    :param value: just computed, so that its elements are next to each other
    """
    *lead, length = value.shape
    is_row = math.prod(lead) == 1
    rows = value.as_strided((1, length), (length, 1)) if is_row else value.reshape(-1, length)
    number = rows.shape[0]
    if rows.is_cuda and number < _FEWEST_ROWS:
        rows = F.pad(rows, (0, 0, 0, _FEWEST_ROWS - number))
        return torch._int_mm(rows, weight.t()).narrow(0, 0, number).reshape(*lead, len(weight))
    return torch._int_mm(rows, weight.t()).reshape(*lead, len(weight))


def has_float8_product() -> bool:
    """Return whether torch can multiply float8 matrices into float32. torch 2.1."""
    return hasattr(torch, "_scaled_mm")


def float8_product(value: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply float8 values by a float8 weight into float32, as `F.linear` does.

    torch 2.5, which asks for scales; the public `F.scaled_mm` of torch 2.10 is a layer over it.
    """
    *lead, length = value.shape
    one = torch.ones((), dtype=torch.float32, device=value.device)
    product = torch._scaled_mm(
        value.reshape(-1, length), weight.t(), scale_a=one, scale_b=one, out_dtype=torch.float32
    )
    return product.reshape(*lead, len(weight))


def has_weight_products() -> bool:
    """Return whether torch has kernels for weights in int8 and int4 on a CPU. torch 2.6."""
    return hasattr(torch, "_weight_int8pack_mm") and hasattr(torch, "_weight_int4pack_mm_for_cpu")


def int8_weight_product(
    rows: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor
) -> torch.Tensor:
    """Multiply rows by an int8 weight with one scale a row of it, as `F.linear` does. torch 2.3."""
    return torch._weight_int8pack_mm(rows.contiguous(), weight, scale)


def int4_packed(integers: torch.Tensor) -> torch.Tensor:
    """Pack a weight of integers from 0 to 15, where 8 stands for zero. torch 2.6."""
    return torch._convert_weight_to_int4pack_for_cpu(integers, 1)


def int4_packed_product(
    rows: torch.Tensor, packed: torch.Tensor, group: int, scales: torch.Tensor
) -> torch.Tensor:
    """Multiply rows by a packed weight with scales of shape (groups, outputs). torch 2.6."""
    both = torch.stack((scales, torch.zeros_like(scales)), -1)
    return torch._weight_int4pack_mm_for_cpu(rows.contiguous(), packed, group, both)


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
