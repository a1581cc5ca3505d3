"""Sources of data: rows or batches are read, and split into calibration and held-out ones."""

import itertools
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from typing_extensions import Unpack

from inlay.data.advice import advice_on_template
from inlay.data.arrow import choose_split
from inlay.data.batch import Batch, main_tensor, problem_with, tensors_of
from inlay.data.paths import rows_at
from inlay.data.rows import Row, row_of
from inlay.data.tokenize import Tokenization
from inlay.errors import ConfigurationError
from inlay.options import DataKeywords, DataOptions
from inlay.ranks.division import Part

__all__ = ["Batches", "batches_of"]

_T = TypeVar("_T")
_END = object()
_ALL = Part()  # of one process


@dataclass(frozen=True, kw_only=True)
class Batches:
    """Batches to calibrate on, and held-out batches to judge the result by.

    Iteration yields the batches to calibrate on. It can be repeated, unless the source can be read
    only once and has no known length.

    :param source: description of the source, for people
    :param samples: how many rows calibrate; None if that is known only after reading them. Of data
        that is divided over processes, these are the rows of all
    :param part: which of the batches of all processes these are
    :param is_divided: whether they were made by dividing data that all processes have
    :param can_repeat: whether they can be read again
    :param asked: how many rows were to calibrate; None if all
    :param advice: what is unusual about the texts
    """

    source: str
    calibration: Iterable[Batch]
    held_out: list[Batch]
    samples: int | None
    part: Part = _ALL
    is_divided: bool = False
    can_repeat: bool = True
    asked: int | None = None
    advice: tuple[str, ...] = ()

    def remarks(self, needs_data: bool) -> str:
        """Describe data that the recipe does not need, and missing rows; empty if neither.

        :param needs_data: whether the recipe observes data
        """
        if self.samples == 0:
            return ""
        if not needs_data:
            return ", not calibrated on: the recipe observes nothing while data runs"
        if self.asked is None or self.samples is None or self.samples >= self.asked:
            return ""
        return f", fewer than samples={self.asked}"

    @property
    def numbered(self) -> Iterator[tuple[int, Batch]]:
        """The batches to calibrate on, each with its number among those of all processes."""
        return ((self.part.number(place), batch) for place, batch in enumerate(self))

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.calibration)

    def __len__(self) -> int:
        if not isinstance(self.calibration, list):
            raise TypeError(f"the number of batches in {self.source} is known only after reading")
        return len(self.calibration)


def batches_of(
    data: Any,
    *,
    tokenizer: Any = None,
    vocabulary: int | None = None,
    part: Part = _ALL,
    **keywords: Unpack[DataKeywords],
) -> Batches:
    """Make batches from a file, texts, a dataset, or an iterable of batches.

    Rows are read in order, and no more of them than needed. Ready batches stay whole: all their
    rows count, and `max_length` and `batch_size` do not apply to them.

    Over several processes, each has the batches of its part, which are those that one process would
    make of the same rows. The first has all held-out ones. Ready batches are the process's own: it
    takes all that it is given, and may be given none.

    If the data has fewer rows than `samples`, or `samples` is None, the last rows are held out, but
    at most an eighth of all. None is held out if neither `samples` nor the length is known.

    :param data: a path to `.txt`, `.jsonl` or `.parquet`, to a folder of these, or to a dataset
        that was saved; texts; rows with `text`, `messages` or `input_ids`, such as those of a
        dataset of Hugging Face; or batches: mappings, tuples or single tensors
    :param tokenizer: a tokenizer of transformers, for texts and messages
    :param vocabulary: how many token ids the model knows
    :param part: the part of this process in the rows
    :param keywords: the fields of `DataOptions`
    """
    options = DataOptions(**keywords)
    samples, held_out = options.samples, options.held_out
    _require_counts(max_length=options.max_length, batch_size=options.batch_size)
    _require_counts(least=0, held_out=held_out)
    if samples is not None:
        _require_counts(samples=samples)
    opened = _open(data, options.split, may_be_empty=part.size > 1)
    if opened is None:
        return Batches(source="no batches", calibration=[], held_out=[], samples=0, part=part)

    def checked(batch: Batch) -> Batch:
        _require_known_ids(batch, vocabulary)
        return batch

    tokenization = Tokenization(tokenizer=tokenizer, max_length=options.max_length)

    def batched(items: Iterable[Any], own: Part) -> Iterator[Batch]:
        if not opened.holds_rows:
            return map(checked, items)
        chunks = enumerate(_chunks(items, options.batch_size))
        return (checked(tokenization.batch(rows)) for place, rows in chunks if own.takes(place))

    if samples is None and not opened.is_finite:
        return Batches(
            source=opened.name,
            calibration=_Restartable(lambda: batched(opened, part)),
            held_out=[],
            samples=None,
            part=part,
            is_divided=opened.holds_rows,
            can_repeat=opened.again is not None,
        )
    weight = _count_one if opened.holds_rows else _row_count
    used, kept, is_all = _split(opened, weight, samples, held_out)
    read = len(used) + len(kept)
    return Batches(
        source=opened.described(len(used), used[0], read, read if is_all else opened.total()),
        calibration=list(batched(used, part)),
        held_out=list(batched(kept, _ALL)) if part.rank == 0 else [],
        samples=sum(map(weight, used)),
        part=part,
        is_divided=opened.holds_rows,
        asked=samples,
        advice=advice_on_template(used, tokenizer) if opened.holds_rows else (),
    )


@dataclass
class _Opened:
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


@dataclass(frozen=True)
class _Restartable:
    """An iterable that calls a function for each new iterator."""

    begin: Callable[[], Iterator[Batch]]

    def __iter__(self) -> Iterator[Batch]:
        return self.begin()


def _open(data: Any, split: str | None, may_be_empty: bool) -> _Opened | None:
    if isinstance(data, (str, os.PathLike)):
        stored = rows_at(data, split)
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
    return _open_iterable(data, may_be_empty)


def _open_iterable(data: Iterable[Any], may_be_empty: bool) -> _Opened | None:
    name = _type_name(data)
    start = iter(data)
    can_begin_anew = start is not data
    first = next(start, _END)
    if first is _END and may_be_empty:
        return None
    holds_rows = _is_dataset(data, "Dataset", "IterableDataset") or _is_row(first)
    read = _rows if holds_rows else _ready_batches
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
) -> _Opened:
    first = next(start, _END)
    if first is _END:
        raise ConfigurationError(f"{name} is empty: there is nothing to calibrate on")
    start = itertools.chain([first], start)
    return _Opened(
        name=name,
        holds_rows=holds_rows,
        is_finite=is_finite,
        start=start,
        again=again,
        total=total,
    )


def _rows(records: Iterable[Any], name: str) -> Iterator[Row]:
    for number, record in enumerate(records, start=1):
        row = row_of(record, f"row {number} of {name}")
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


def _split(
    items: Iterable[_T], weight: Callable[[_T], int], samples: int | None, held_out: int
) -> tuple[list[_T], list[_T], bool]:
    """Split items into calibration and held-out ones, without reading more than needed.

    :return: also whether these are known to be all items
    """
    iterator = iter(items)
    used, is_all = _take(iterator, weight, samples)
    if not is_all:
        return used, *_take(iterator, weight, held_out)
    room = min(held_out, sum(map(weight, used)) // 8)
    kept: list[_T] = []
    while used and weight(used[-1]) <= room:
        room -= weight(used[-1])
        kept.insert(0, used.pop())
    return used, kept, True


def _take(
    iterator: Iterator[_T], weight: Callable[[_T], int], limit: int | None
) -> tuple[list[_T], bool]:
    """Take items up to a sum of weights; return them, and whether the iterator ended before."""
    taken: list[_T] = []
    total = 0
    while limit is None or total < limit:
        item = next(iterator, _END)
        if item is _END:
            return taken, True
        taken.append(item)  # type: ignore[arg-type]
        total += weight(taken[-1])
    return taken, False


def _chunks(rows: Iterable[Row], size: int) -> Iterator[list[Row]]:
    iterator = iter(rows)
    while chunk := list(itertools.islice(iterator, size)):
        yield chunk


def _count_one(_row: Any) -> int:
    return 1


def _row_count(batch: Batch) -> int:
    main = main_tensor(batch)
    return main.shape[0] if main.ndim > 1 else 1


def _require_counts(*, least: int = 1, **counts: int) -> None:
    for name, count in counts.items():
        if type(count) is not int or count < least:
            raise ConfigurationError(f"{name} must be a whole number from {least}, got {count!r}")


def _require_known_ids(batch: Batch, vocabulary: int | None) -> None:
    """Refuse ids without an embedding, which would end in an index error."""
    ids = batch.get("input_ids") if isinstance(batch, dict) else batch[0]
    if not isinstance(ids, torch.Tensor) or ids.is_floating_point():
        return
    if vocabulary is None and isinstance(batch, tuple):
        return
    low, high = int(ids.min()), int(ids.max())
    if low < 0:
        raise ConfigurationError(f"token id {low} is below 0; mark padding in the attention_mask")
    if vocabulary is not None and high >= vocabulary:
        raise ConfigurationError(
            f"token id {high} is beyond the model's vocabulary of {vocabulary}; use the model's "
            "own tokenizer"
        )


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
