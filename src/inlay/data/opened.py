"""Open a source of data: read its first item, and learn whether it holds rows or batches."""

import itertools
import os
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from inlay.data.arrow import choose_split
from inlay.data.batch import Batch, main_tensor, problem_with, tensors_of
from inlay.data.paths import rows_of
from inlay.data.rows import Row, row_of
from inlay.errors import ConfigurationError
from inlay.options import DataOptions

__all__ = ["Opened", "open_source"]

_END = object()


@dataclass
class Opened:
    """A source whose first item has been read."""

    name: str
    holds_rows: bool
    is_finite: bool
    start: Iterator[Any] | None  # the first reading, from its first item on
    again: Callable[[], Iterator[Any]] | None
    total: Callable[[], int | None]  # how many items there are, if that can be known

    def __iter__(self) -> Iterator[Any]:
        if self.start is not None:
            start, self.start = self.start, None
            return start
        if self.again is None:
            raise ConfigurationError(
                f"{self.name} can be read only once; pass a list, or set the number of samples"
            )
        return self.again()

    def shuffled(self, seed: int) -> "Opened":
        """Return the same items in an order that the seed decides. All are read."""
        if not self.is_finite:
            raise ConfigurationError(
                f"{self.name} has no end that is known, so it cannot be shuffled; leave out seed"
            )
        items = list(self)
        random.Random(seed).shuffle(items)
        return replace(self, start=None, again=lambda: iter(items))

    def described(self, used: int, first: Any, read: int, total: int | None) -> str:
        """Describe the source, and how much of it calibrates if that is not all.

        :param used: how many items calibrate
        :param read: the same, and those that are held out
        :param total: how many items there are; None if that is unknown
        """
        noun = first.nouns if isinstance(first, Row) else "batches"
        count = f"the first {used:,}" if total is None else f"{used:,} of {total:,}"
        if total == read:
            count = f"{total:,}"
        if self.name == "a list":
            return f"{count} {noun}"
        is_counted = self.holds_rows or total not in (None, read)
        return f"{self.name}, {count} {noun}" if is_counted else self.name


def open_source(data: Any, options: DataOptions, may_be_empty: bool) -> Opened | None:
    split = options.split
    if isinstance(data, (str, os.PathLike)):
        stored = rows_of(data, options)
        return _peeked(stored.name, iter(stored), again=lambda: iter(stored), total=stored.count)
    if _is_dataset(data, "DatasetDict"):
        data, _ = choose_split(data, split, "the data")
    elif split is not None:
        raise ConfigurationError(f"{_type_name(data)} has no split {split!r}; leave it out")
    if isinstance(data, torch.Tensor):
        raise ConfigurationError("data is a single tensor; pass a list of batches: [tensor]")
    if isinstance(data, Mapping):
        keys = ", ".join(map(str, data))
        raise ConfigurationError(f"data is a single mapping with {keys}; pass a list of batches")
    if not isinstance(data, Iterable):
        raise ConfigurationError(f"cannot calibrate on a {type(data).__name__}: {data!r}")
    return _open_iterable(data, options.text_column, may_be_empty)


def _open_iterable(data: Iterable[Any], text_column: str, may_be_empty: bool) -> Opened | None:
    name = _type_name(data)
    start = iter(data)
    can_begin_anew = start is not data
    first = next(start, _END)
    if first is _END and may_be_empty:
        return None
    holds_rows = _is_dataset(data, "Dataset", "IterableDataset") or _is_row(first)
    read = partial(_rows, text_column=text_column) if holds_rows else _ready_batches
    return _peeked(
        name,
        read(itertools.chain([] if first is _END else [first], start), name),
        again=(lambda: read(data, name)) if can_begin_anew else None,
        holds_rows=holds_rows,
        is_finite=_length(data) is not None,
        total=lambda: _length(data),
    )


def _peeked(
    name: str,
    start: Iterator[Any],
    *,
    again: Callable[[], Iterator[Any]] | None,
    total: Callable[[], int | None],
    holds_rows: bool = True,
    is_finite: bool = True,
) -> Opened:
    first = next(start, _END)
    if first is _END:
        raise ConfigurationError(f"{name} is empty: there is nothing to calibrate on")
    start = itertools.chain([first], start)
    return Opened(
        name=name,
        holds_rows=holds_rows,
        is_finite=is_finite,
        start=start,
        again=again,
        total=total,
    )


def _rows(records: Iterable[Any], name: str, text_column: str) -> Iterator[Row]:
    for number, record in enumerate(records, start=1):
        row = row_of(record, f"row {number} of {name}", text_column)
        if row is not None:
            yield row


def _ready_batches(items: Iterable[Any], name: str) -> Iterator[Batch]:
    return (_as_batch(item, f"batch {number} of {name}") for number, item in enumerate(items, 1))


def _as_batch(item: Any, place: str) -> Batch:
    """Turn an item into a batch: a mapping by name, or a tuple by position."""
    if isinstance(item, torch.Tensor):
        item = (item,)
    if isinstance(item, Mapping):
        parts = {str(name): part for name, part in item.items()}
    elif isinstance(item, (tuple, list)):
        parts = {f"entry {index}": part for index, part in enumerate(item)}
    else:
        parts = {}
    for name, part in parts.items():
        problem = problem_with(part)
        if problem is not None:
            raise ConfigurationError(
                f"{place}: {name} is {problem}; convert it, or leave it out if the model does not "
                "take it"
            )
    if not any(True for _ in tensors_of(parts)):
        raise ConfigurationError(
            f"{place} is a {type(item).__name__} without tensors; expected a mapping with "
            "tensors, a tuple with tensors or a tensor"
        )
    batch = parts if isinstance(item, Mapping) else tuple(parts.values())
    if main_tensor(batch).numel() == 0:
        raise ConfigurationError(f"{place} is empty; leave it out")
    return batch


def _is_row(item: Any) -> bool:
    if isinstance(item, Mapping):
        return not any(isinstance(part, torch.Tensor) for part in item.values())
    return isinstance(item, str)


def _length(data: Any) -> int | None:
    try:
        return len(data)
    except (TypeError, NotImplementedError):
        return None


def _is_dataset(data: Any, *classes: str) -> bool:
    """Return whether data is of a class of the library datasets, without importing that."""
    library = sys.modules.get("datasets")
    return library is not None and isinstance(data, tuple(getattr(library, c) for c in classes))


def _type_name(data: Any) -> str:
    name = "list" if isinstance(data, (list, tuple)) else type(data).__name__
    return f"{'an' if name[0] in 'AEIOUaeio' else 'a'} {name}"
