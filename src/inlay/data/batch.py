"""Batches: the arguments of one call of a model, by name or by position."""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
    "problem_with",
    "tensors_of",
    "varying_sizes",
]

# Arguments are tensors, plain values such as `use_cache=False`, and containers of these.
Batch = dict[str, Any] | tuple[Any, ...]
# Dimensions of tensors, by the name or position of the tensor in a batch.
Varying = Mapping[str | int, Sequence[int]]

_PLAIN = (bool, int, float, str, type(None), torch.dtype)


def main_tensor(batch: Batch) -> torch.Tensor:
    """Return the tensor whose shape tells how much a batch holds."""
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    return ids if isinstance(ids, torch.Tensor) else next(tensors_of(batch))


def tensors_of(part: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a batch, or of one of its arguments, in order."""
    if isinstance(part, torch.Tensor):
        yield part
    elif isinstance(part, (Mapping, tuple, list)):
        for _, inner in _parts(part):
            yield from tensors_of(inner)


def problem_with(part: Any) -> str | None:
    """Return why an argument cannot be part of a batch; None if it can."""
    if isinstance(part, (Mapping, tuple, list)):
        return next(filter(None, (problem_with(inner) for _, inner in _parts(part))), None)
    if isinstance(part, (torch.Tensor, *_PLAIN)):
        return None
    return f"a {type(part).__name__}, neither a tensor nor a plain value"


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
    for name, part in sorted(_parts(batch), key=lambda pair: str(pair[0])):
        _add(part, f"{name!r}", found.update)
    return found.digest()


def _add(part: Any, name: str, update: Callable[[bytes], None]) -> None:
    """Add an argument to a fingerprint."""
    if isinstance(part, torch.Tensor):
        update(f"{name} {part.dtype} {tuple(part.shape)};".encode())
        # A single element counts as contiguous whatever its stride; only a copy really is.
        flat = part.detach().cpu().reshape(-1).clone(memory_format=torch.contiguous_format)
        update(flat.view(torch.uint8).numpy().tobytes())
    elif isinstance(part, (Mapping, tuple, list)):
        update(f"{name} {len(part)} in a {type(part).__name__};".encode())
        for key, inner in _parts(part):
            _add(inner, f"{key!r}", update)
    else:
        update(f"{name} {part!r};".encode())


def varying_sizes(batches: Iterable[Any]) -> Varying:
    """Find dimensions in which no size is common to more than half of the batches.

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
        moved[name] = part = _moved(part, device)  # marks go on this tensor, not on the caller's
        if isinstance(part, torch.Tensor):
            for dim in (varying or {}).get(name, ()):
                mark_varying(part, dim)
    return moved if isinstance(batch, Mapping) else tuple(moved.values())


def _moved(part: Any, device: torch.device) -> Any:
    if isinstance(part, torch.Tensor):
        return part.detach().to(device)
    if isinstance(part, Mapping):
        return {key: _moved(inner, device) for key, inner in part.items()}
    if isinstance(part, (tuple, list)):
        return type(part)(_moved(inner, device) for inner in part)
    return part


def _parts(batch: Any) -> Iterable[tuple[Any, Any]]:
    return batch.items() if isinstance(batch, Mapping) else enumerate(batch)
