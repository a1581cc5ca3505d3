"""Merge statistics over ranks, many observers at a time.

All statistics travel packed, one collective for each operation and dtype, after two small ones in
which the ranks agree on what is there. A rank that saw no data learns the shapes from the others
and contributes the neutral element, so nobody waits for a collective that never comes.
"""

import math
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import distributed as dist

from inlay.errors import ConfigurationError, StatisticsError

if TYPE_CHECKING:
    from inlay.observers.base import Observer

__all__ = ["start_sync", "sync_observers"]

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


def sync_observers(observers: Iterable["Observer"]) -> None:
    """Merge the statistics of many observers over all ranks, and wait until it is done.

    Call it on every rank with the same observers in the same order. Without a process group there
    is nothing to merge. Averages weigh a rank by the values it observed since the last call.
    """
    for work in start_sync(observers):
        work.wait()


def start_sync(observers: Iterable["Observer"]) -> list[dist.Work]:
    """Start merging; the statistics are merged when each handle has been waited for."""
    if not dist.is_available() or not dist.is_initialized():
        return []
    entries = [
        _Entry(observer, name, _rule(observer, name, op))
        for observer in observers
        for name, op in observer._act_sync_dict.items()
    ]
    device = _wire_device()
    _require_same_entries(entries, device)
    layouts = _agree_on_layouts(entries, device)

    buckets: dict[tuple[Any, torch.dtype], list[_Parcel]] = {}
    for entry, layout in zip(entries, layouts, strict=True):
        if layout is not None:
            key = entry.rule.reduce, entry.rule.wire_dtype(layout.dtype)
            buckets.setdefault(key, []).append(_Parcel(entry, layout, *entry.contribution()))
    for entry in entries:
        entry.observer._unsynced_observations = 0
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


class _Rule(Protocol):
    """How a statistic is turned into numbers that one collective merges, and back."""

    reduce: Any

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype: ...

    def pack(
        self, value: torch.Tensor | None, weight: int, layout: _Layout, wire: torch.dtype
    ) -> torch.Tensor: ...

    def unpack(self, merged: torch.Tensor, own: torch.Tensor | None) -> torch.Tensor: ...


class _Extremum:
    """MIN and MAX, both as a maximum: the minimum travels turned around, which is exact."""

    reduce = dist.ReduceOp.MAX

    def __init__(self, *, minimum: bool) -> None:
        self.minimum = minimum

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        if not dtype.is_floating_point:
            return torch.int64
        return torch.promote_types(dtype, torch.float32)

    def pack(
        self, value: torch.Tensor | None, weight: int, layout: _Layout, wire: torch.dtype
    ) -> torch.Tensor:
        if value is None:
            lowest = -torch.inf if wire.is_floating_point else torch.iinfo(wire).min
            return torch.full(layout.shape, lowest, dtype=wire)
        value = self._turn(value.to(wire))
        # A collective may drop NaN. Infinity survives, and is refused as well later.
        return value.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)

    def unpack(self, merged: torch.Tensor, own: torch.Tensor | None) -> torch.Tensor:
        return self._turn(merged)

    def _turn(self, value: torch.Tensor) -> torch.Tensor:
        if not self.minimum:
            return value
        return -value if value.is_floating_point() else ~value


class _Sum:
    """SUM of what each rank gathered since the last synchronization."""

    reduce = dist.ReduceOp.SUM

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float64 if dtype.is_floating_point else torch.int64

    def pack(
        self, value: torch.Tensor | None, weight: int, layout: _Layout, wire: torch.dtype
    ) -> torch.Tensor:
        return torch.zeros(layout.shape, dtype=wire) if value is None else value.to(wire)

    def unpack(self, merged: torch.Tensor, own: torch.Tensor | None) -> torch.Tensor:
        return merged


class _Average:
    """AVG, as a sum of values times weights beside the sum of weights."""

    reduce = dist.ReduceOp.SUM

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float64

    def pack(
        self, value: torch.Tensor | None, weight: int, layout: _Layout, wire: torch.dtype
    ) -> torch.Tensor:
        if value is None or weight == 0:
            return torch.zeros(math.prod(layout.shape) + 1, dtype=wire)
        weighted = (value.to(wire) * weight).flatten()
        return torch.cat([weighted, weighted.new_tensor([weight])])

    def unpack(self, merged: torch.Tensor, own: torch.Tensor | None) -> torch.Tensor:
        total = merged[-1]
        if own is not None and int(total) == 0:  # nobody saw anything new
            return own.to(merged)
        return merged[:-1] / total


_RULES: dict[str, _Rule] = {
    "MIN": _Extremum(minimum=True),
    "MAX": _Extremum(minimum=False),
    "SUM": _Sum(),
    "AVG": _Average(),
}


def _rule(observer: "Observer", name: str, op: Any) -> _Rule:
    for known, rule in _RULES.items():
        if op == getattr(dist.ReduceOp, known):
            return rule
    raise ConfigurationError(
        f"{observer.slot}: {name} cannot be merged with {op}; use one of {', '.join(_RULES)}"
    )


@dataclass(frozen=True)
class _Entry:
    """One statistic of one observer."""

    observer: "Observer"
    name: str
    rule: _Rule

    @property
    def value(self) -> torch.Tensor | None:
        value = getattr(self.observer, self.name, None)
        return value if isinstance(value, torch.Tensor) else None

    def contribution(self) -> tuple[torch.Tensor | None, int]:
        """What this rank adds to the merge, and how much that weighs."""
        value, base = self.value, self.observer._synced.get(self.name)
        if value is not None and base is not None and isinstance(self.rule, _Sum):
            value = value - base.to(value)
        first_time = self.name not in self.observer._synced
        # Statistics set without `forward` were never counted; they count once.
        return value, self.observer._unsynced_observations or int(first_time)

    def accept(self, merged: torch.Tensor, layout: _Layout) -> None:
        own = self.value
        result = self.rule.unpack(merged, own)
        base = self.observer._synced.get(self.name)
        if base is not None and isinstance(self.rule, _Sum):
            result = result + base.to(result)
        result = result.reshape(layout.shape).to(layout.dtype)
        result = result.to(own.device if own is not None else result.device)
        setattr(self.observer, self.name, result)
        self.observer._synced[self.name] = result


@dataclass(frozen=True)
class _Parcel:
    """An entry's contribution, ready to be packed."""

    entry: _Entry
    layout: _Layout
    value: torch.Tensor | None
    weight: int

    def pack(self, wire: torch.dtype, device: torch.device) -> torch.Tensor:
        packed = self.entry.rule.pack(self.value, self.weight, self.layout, wire)
        return packed.to(device).flatten()


class _Delivery(dist.Work):
    """A collective under way. Waiting for it hands the merged statistics to their observers."""

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
                parcel.entry.accept(merged, parcel.layout)
        return True

    def is_completed(self) -> bool:
        return self._work is None or self._work.is_completed()


def _send(op: Any, wire: torch.dtype, parcels: list[_Parcel], device: torch.device) -> dist.Work:
    packed = [parcel.pack(wire, device) for parcel in parcels]
    buffer = torch.cat(packed)
    work = dist.all_reduce(buffer, op=op, async_op=True)
    assert work is not None
    return _Delivery(work, torch.split(buffer, [part.numel() for part in packed]), parcels)


def _require_same_entries(entries: list[_Entry], device: torch.device) -> None:
    names = "\n".join(f"{type(e.observer).__name__}.{e.name}" for e in entries)
    own = torch.tensor([len(entries), zlib.crc32(names.encode())], device=device)
    if not _is_same_everywhere(own):
        raise StatisticsError(
            f"the ranks do not synchronize the same observers (this one has {len(entries)} "
            "statistics); call it on every rank with the same observers in the same order"
        )


def _agree_on_layouts(entries: list[_Entry], device: torch.device) -> list[_Layout | None]:
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
        f"{entry.observer.slot}.{entry.name}"
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


def _is_same_everywhere(own: torch.Tensor) -> bool:
    both = torch.stack([own, -own])
    dist.all_reduce(both, op=dist.ReduceOp.MAX)
    return torch.equal(both[0], -both[1])


def _wire_device() -> torch.device:
    """Gloo and MPI reduce in main memory, the others on the accelerator they are made for."""
    if any(name in dist.get_backend() for name in ("gloo", "mpi")):
        return torch.device("cpu")
    return torch.accelerator.current_accelerator() or torch.device("cpu")
