"""Sources of data: rows or batches are read, and split into calibration and held-out ones."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from typing_extensions import Unpack

from inlay.data.advice import advice_on_template
from inlay.data.batch import Batch, main_tensor
from inlay.data.opened import open_source
from inlay.data.rows import Row
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
    :param advice: warnings about the texts
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
        that was saved; texts; rows with `text`, `messages` or `input_ids`, and with `images` or
        `audio`, such as those of a dataset of Hugging Face; or batches: mappings, tuples or single
        tensors
    :param tokenizer: a tokenizer of transformers for texts and messages, or a processor
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
    opened = open_source(data, options, may_be_empty=part.size > 1)
    if opened is None:
        return Batches(source="no batches", calibration=[], held_out=[], samples=0, part=part)
    if options.seed is not None:
        opened = opened.shuffled(options.seed)

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
    source = opened.described(len(used), used[0], read, read if is_all else opened.total())
    return Batches(
        source=source if options.seed is None else f"{source}, shuffled by seed {options.seed}",
        calibration=list(batched(used, part)),
        held_out=list(batched(kept, _ALL)) if part.rank == 0 else [],
        samples=sum(map(weight, used)),
        part=part,
        is_divided=opened.holds_rows,
        asked=samples,
        advice=advice_on_template(used, tokenizer) if opened.holds_rows else (),
    )


@dataclass(frozen=True)
class _Restartable:
    """An iterable that calls a function for each new iterator."""

    begin: Callable[[], Iterator[Batch]]

    def __iter__(self) -> Iterator[Batch]:
        return self.begin()


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
