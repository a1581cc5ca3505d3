"""A batch: what a model is called with, by name or by position."""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

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
# Dimensions of tensors, by the name or place that these have in a batch.
Varying = Mapping[str | int, Sequence[int]]


def main_tensor(batch: Batch) -> torch.Tensor:
    """The tensor that says how much there is in a batch."""
    if isinstance(batch, tuple):
        return batch[0]
    return batch.get("input_ids", next(iter(batch.values())))


def count_tokens(batch: Batch) -> tuple[int, int]:
    """How many tokens of a batch count, and how many are padding."""
    mask = batch.get("attention_mask") if isinstance(batch, dict) else None
    if mask is not None and mask.ndim == 2:
        counted = int((mask != 0).sum())
        return counted, mask.numel() - counted
    main = main_tensor(batch)
    if not main.is_floating_point():
        return main.numel(), 0
    # Vectors of features, a row or a position each; whatever else, such as an image, is one.
    positions = main.shape[:-1] if main.ndim in (2, 3) else main.shape[:1]
    return positions.numel(), 0


def digest(batch: Batch) -> bytes:
    """A fingerprint by which the same batch is recognized, on whatever device it is."""
    found = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(_parts(batch), key=lambda pair: str(pair[0])):
        found.update(f"{name!r} {tensor.dtype} {tuple(tensor.shape)};".encode())
        # A single element counts as contiguous whatever its stride; only a copy surely is.
        flat = tensor.detach().cpu().reshape(-1).clone(memory_format=torch.contiguous_format)
        found.update(flat.view(torch.uint8).numpy().tobytes())
    return found.digest()


def varying_sizes(batches: Iterable[Any]) -> Varying:
    """Dimensions that no half of the batches agree on, as the length of texts.

    Compiled for the first batch alone, a model would be compiled again with the second. Where most
    sizes are the same, it is worth that: code for one size is faster.
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
    """The batch where the model is.

    :param varying: sizes that are not to be relied on when it is compiled
    """
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    moved = {}
    for name, part in _parts(batch):
        if isinstance(part, torch.Tensor):
            part = part.detach().to(device)  # a tensor of its own, which can be marked
            for dim in (varying or {}).get(name, ()):
                mark_varying(part, dim)
        moved[name] = part
    return moved if isinstance(batch, Mapping) else tuple(moved.values())


def _parts(batch: Any) -> Iterable[tuple[Any, Any]]:
    return batch.items() if isinstance(batch, Mapping) else enumerate(batch)
