"""Batches: the arguments of one call of a model, by name or by position."""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from inlay.calibration.tracing.strategies import by_name
from inlay.errors import StatisticsError
from inlay.graph import MAIN
from inlay.padding.valid_tokens import valid_tokens
from inlay.torch_private import mark_varying

__all__ = [
    "Batch",
    "Varying",
    "count_tokens",
    "digest",
    "main_tensor",
    "on_device_of",
    "varying_sizes",
]

Batch = dict[str, torch.Tensor] | tuple[torch.Tensor, ...]
# Dimensions of tensors, by the name or position of the tensor in a batch.
Varying = Mapping[str | int, Sequence[int]]


def main_tensor(batch: Batch) -> torch.Tensor:
    """Return the tensor whose shape tells how much a batch holds."""
    if isinstance(batch, tuple):
        return batch[0]
    return batch.get("input_ids", next(iter(batch.values())))


def count_tokens(model: nn.Module, batch: Batch, *, count_padding: bool = False) -> tuple[int, int]:
    """Return how many tokens of a batch are valid, and how many are padding.

    :param model: names the arguments of a batch that has none
    :param count_padding: whether a mask that does not tell padding for certain is left aside
    :raises StatisticsError: if a mask does not, and padding is not to be counted
    """
    by_position = batch if isinstance(batch, tuple) else ()
    _, named = by_name(model, by_position, batch if isinstance(batch, Mapping) else {})
    try:
        valid = valid_tokens(named).get(MAIN)
    except StatisticsError:
        if not count_padding:
            raise
        valid = None
    if valid is not None:
        counted = int(valid.sum())
        return counted, valid.numel() - counted
    main = main_tensor(batch)
    if not main.is_floating_point():
        return main.numel(), 0
    # Each row or position of feature vectors is a token; anything else, such as an image, is one.
    positions = main.shape[:-1] if main.ndim in (2, 3) else main.shape[:1]
    return positions.numel(), 0


def digest(batch: Batch) -> bytes:
    """Return a fingerprint that is the same for equal batches on any device."""
    found = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(_parts(batch), key=lambda pair: str(pair[0])):
        found.update(f"{name!r} {tensor.dtype} {tuple(tensor.shape)};".encode())
        # A single element counts as contiguous whatever its stride; only a copy really is.
        flat = tensor.detach().cpu().reshape(-1).clone(memory_format=torch.contiguous_format)
        found.update(flat.view(torch.uint8).numpy().tobytes())
    return found.digest()


def varying_sizes(batches: Iterable[Any]) -> Varying:
    """Find dimensions for which no size is that of more than half of the batches.

    The length of texts is one. Compiled for the first length, a model would be compiled again for
    the second. If most sizes are equal that pays off: code for one size is faster.
    """
    shapes: dict[str | int, list[torch.Size]] = defaultdict(list)
    for batch in batches:
        for name, part in _parts(batch):
            if isinstance(part, torch.Tensor):
                shapes[name].append(part.shape)
    return {
        name: [dim for dim, sizes in enumerate(zip(*of, strict=True)) if _differ(sizes)]
        for name, of in shapes.items()
        if len({len(shape) for shape in of}) == 1
    }


def _differ(sizes: Sequence[int]) -> bool:
    ((_, most),) = Counter(sizes).most_common(1)
    return 2 * most <= len(sizes)


def on_device_of(model: nn.Module, batch: Any, varying: Varying | None = None) -> Any:
    """Move a batch to the device of the model.

    :param varying: dimensions whose size compiled code must not rely on
    """
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    moved = {}
    for name, part in _parts(batch):
        if isinstance(part, torch.Tensor):
            part = part.detach().to(device)  # marks go on this tensor, not on the caller's
            for dim in (varying or {}).get(name, ()):
                mark_varying(part, dim)
        moved[name] = part
    return moved if isinstance(batch, Mapping) else tuple(moved.values())


def _parts(batch: Any) -> Iterable[tuple[Any, Any]]:
    return batch.items() if isinstance(batch, Mapping) else enumerate(batch)
