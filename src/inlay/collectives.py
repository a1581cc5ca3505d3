"""Merge statistics over ranks, many at a time.

All statistics travel packed, one collective for each operation and dtype, after two small ones in
which the ranks agree on what is there. A rank that saw no data learns the shapes from the others
and sends what changes nothing, so no rank waits for a collective that never comes.
"""

import io
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import distributed as dist

from inlay.errors import StatisticsError
from inlay.ranks.division import Part, share
from inlay.ranks.together import collective
from inlay.reductions import Reduction

__all__ = [
    "Entry",
    "each_by_one_rank",
    "from_all_ranks",
    "have_ranks",
    "merge_now",
    "start_merging",
    "to_first_rank",
]

_MAX_RANK = 8
_ABSENT = torch.iinfo(torch.int64).min + 1  # negation keeps it in range
_UNMERGEABLE = -1
_DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One statistic of this rank.

    :param name: names the statistic in errors, such as `fc.input.min_vals`
    :param kind: description; the same on all ranks
    :param value: None if this rank has none
    :param weight: the number of values it stands for
    :param deliver: takes the merged statistic; it is not called if no rank had any
    """

    name: str
    kind: str
    reduction: Reduction
    value: torch.Tensor | None
    weight: int
    deliver: Callable[[torch.Tensor], None]


def have_ranks() -> bool:
    """Whether there is a process group to merge over."""
    return dist.is_available() and dist.is_initialized()


_T = TypeVar("_T")


def from_all_ranks(value: _T) -> list[_T]:
    """What all ranks have to say, in the order of ranks; every rank calls it. For small things."""
    if not have_ranks():
        return [value]
    found: list[Any] = [None] * dist.get_world_size()
    with collective():
        dist.all_gather_object(found, _packed(value))
    return [_unpacked(packed) for packed in found]


def to_first_rank(value: _T) -> list[_T]:
    """What all ranks have to say, on the first one; nothing on the others. Every rank calls it."""
    if not have_ranks():
        return [value]
    found: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    with collective():
        dist.gather_object(_packed(value), found)
    return [_unpacked(packed) for packed in found or ()]


def _packed(value: Any) -> bytes:
    # By torch: pickle alone does not take tensors of all dtypes.
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _unpacked(packed: bytes) -> Any:
    # From the processes of this run, so it may hold any object.
    return torch.load(io.BytesIO(packed), map_location="cpu", weights_only=False)


def each_by_one_rank(
    costs: Mapping[str, float],
    compute: Callable[[Sequence[str]], Iterable[tuple[str, _T]]],
    *,
    together: Iterable[Iterable[str]] = (),
    device_of: Callable[[str], torch.device],
) -> dict[str, _T]:
    """Compute each piece of a work on one rank, and give all ranks all results.

    Every rank calls it with the same pieces. Without a process group it computes all of them.

    :param costs: the pieces by name, with what they cost in any unit
    :param compute: computes the pieces with these names, one after another
    :param together: pieces that the same rank has to compute
    :param device_of: where the tensors in the result of a piece belong
    :return: results in the order of `costs`
    """
    own = dict(compute(share(costs, Part.own(), together)))
    if not have_ranks():
        return own
    cpu = torch.device("cpu")
    of_ranks = from_all_ranks({name: _moved(result, cpu) for name, result in own.items()})
    found = {name: result for results in of_ranks for name, result in results.items()}
    return {name: _moved(found[name], device_of(name)) for name in costs}


def _moved(result: Any, device: torch.device) -> Any:
    """A result with its tensors on a device, in dictionaries and tuples too."""
    if isinstance(result, torch.Tensor):
        return result.detach().to(device)
    if isinstance(result, dict):
        return {key: _moved(value, device) for key, value in result.items()}
    if type(result) is tuple:
        return tuple(_moved(value, device) for value in result)
    return result


def merge_now(entries: Sequence[Entry]) -> None:
    """Merge, and wait until everything is delivered. Every rank calls it, as `start_merging`."""
    works = start_merging(entries)
    with collective():
        for work in works:
            work.wait()


def start_merging(entries: Sequence[Entry]) -> list[dist.Work]:
    """Start merging. Waiting for a handle delivers what it carries.

    Every rank must call it with entries of the same kinds in the same order.
    """
    device = _wire_device()
    with collective():
        _require_same_entries(entries, device)
        layouts = _agree_on_layouts(entries, device)
        buckets: dict[tuple[Any, torch.dtype], list[_Parcel]] = {}
        for entry, layout in zip(entries, layouts, strict=True):
            if layout is not None:
                key = entry.reduction.operation, entry.reduction.wire_dtype(layout.dtype)
                buckets.setdefault(key, []).append(_Parcel(entry, layout))
        return [_send(*key, parcels, device) for key, parcels in buckets.items()]


@dataclass(frozen=True)
class _Layout:
    """Shape and dtype of a statistic, the same on all ranks that have it."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @staticmethod
    def encode(value: torch.Tensor) -> list[int]:
        if value.dtype not in _DTYPES or value.ndim > _MAX_RANK:
            # Refused when all ranks know of it: one that raises alone leaves the others waiting.
            return [_UNMERGEABLE] * (2 + _MAX_RANK)
        padding = [0] * (_MAX_RANK - value.ndim)
        return [_DTYPES.index(value.dtype), value.ndim, *value.shape, *padding]

    @staticmethod
    def decode(row: list[int]) -> "_Layout":
        dtype, ndim, *shape = row
        return _Layout(_DTYPES[dtype], tuple(shape[:ndim]))


@dataclass(frozen=True)
class _Parcel:
    """An entry on its way."""

    entry: Entry
    layout: _Layout

    def pack(self, wire: torch.dtype, device: torch.device) -> torch.Tensor:
        value, reduction = self.entry.value, self.entry.reduction
        packed = (
            reduction.nothing(self.layout.shape, wire)
            if value is None
            else reduction.pack(value, self.entry.weight)
        )
        return packed.to(device)

    def unpack(self, packed: torch.Tensor) -> None:
        result, own = self.entry.reduction.unpack(packed), self.entry.value
        if result is None:  # nobody saw anything new
            return
        result = result.reshape(self.layout.shape).to(self.layout.dtype)
        self.entry.deliver(result if own is None else result.to(own.device))


class _Delivery(dist.Work):
    """A collective under way. Waiting for it delivers the merged statistics."""

    def __init__(
        self, work: dist.Work, merged: Iterable[torch.Tensor], parcels: Iterable[_Parcel]
    ) -> None:
        super().__init__()
        self._work: dist.Work | None = work
        self._deliveries = list(zip(merged, parcels, strict=True))

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if self._work is not None:
            self._work.wait(timeout)
            self._work = None
            for merged, parcel in self._deliveries:
                parcel.unpack(merged)
        return True

    def is_completed(self) -> bool:
        return self._work is None or self._work.is_completed()


def _send(op: Any, wire: torch.dtype, parcels: list[_Parcel], device: torch.device) -> dist.Work:
    packed = [parcel.pack(wire, device) for parcel in parcels]
    buffer = torch.cat(packed)
    work = dist.all_reduce(buffer, op=op, async_op=True)
    assert work is not None
    return _Delivery(work, torch.split(buffer, [part.numel() for part in packed]), parcels)


def _require_same_entries(entries: Sequence[Entry], device: torch.device) -> None:
    kinds = "\n".join(entry.kind for entry in entries)
    own = torch.tensor([len(entries), zlib.crc32(kinds.encode())], device=device)
    both = torch.stack([own, -own])
    dist.all_reduce(both, op=dist.ReduceOp.MAX)
    if not torch.equal(both[0], -both[1]):
        raise StatisticsError(
            f"the ranks do not synchronize the same observers (this one has {len(entries)} "
            "statistics); call it on every rank with the same observers in the same order"
        )


def _agree_on_layouts(entries: Sequence[Entry], device: torch.device) -> list[_Layout | None]:
    """The layout of each entry, from the ranks that have it; None where no rank has."""
    if not entries:
        return []
    absent = [_ABSENT] * (2 + _MAX_RANK)
    rows, negated = [], []
    for entry in entries:
        row = None if entry.value is None else _Layout.encode(entry.value)
        rows.append(row or absent)
        negated.append([-number for number in row] if row else absent)
    both = torch.tensor([rows, negated], dtype=torch.int64, device=device)
    dist.all_reduce(both, op=dist.ReduceOp.MAX)
    largest, smallest = both[0].tolist(), (-both[1]).tolist()

    differing = [
        entry.name
        for entry, high, low in zip(entries, largest, smallest, strict=True)
        if high[0] == _UNMERGEABLE or (high[0] != _ABSENT and high != low)
    ]
    if differing:
        raise StatisticsError(
            "these statistics have other shapes or dtypes on other ranks, or more than "
            f"{_MAX_RANK} dimensions, or a dtype that cannot be merged: {', '.join(differing)}; "
            "run the same model in the same dtype on every rank"
        )
    return [None if row[0] == _ABSENT else _Layout.decode(row) for row in largest]


def _wire_device() -> torch.device:
    """Gloo and MPI reduce in main memory, the others on the accelerator they are made for."""
    if any(name in dist.get_backend() for name in ("gloo", "mpi")):
        return torch.device("cpu")
    return torch.accelerator.current_accelerator() or torch.device("cpu")
