"""Rows at a path: a file, a folder of files, or a saved dataset. Importing this takes no time."""

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from inlay.data.arrow import is_saved_dataset, parquet_count, parquet_records, saved_dataset
from inlay.data.rows import TEXT, Row, row_of
from inlay.errors import ConfigurationError
from inlay.options import RowOptions

__all__ = ["SAMPLE", "StoredRows", "rows_of"]

# A short text for trying things out.
SAMPLE = Path(__file__).with_name("sample.txt")

_Records = Iterator[tuple[str, Any]]  # each with its place in words


@dataclass(frozen=True, kw_only=True)
class StoredRows:
    """Rows on disk, read one by one each time they are iterated.

    :param name: the name of the file or folder
    :param records: returns an iterator of rows that are not parsed yet, given the column of texts
    :param count: returns how many rows there are, without reading them
    :param text_column: the key of the text in a row
    :param folder: paths of images are relative to it
    """

    name: str
    records: Callable[[str], _Records]
    count: Callable[[], int]
    text_column: str = TEXT
    folder: Path | None = None

    def __iter__(self) -> Iterator[Row]:
        for place, record in self.records(self.text_column):
            row = row_of(record, place, self.text_column)
            if row is not None:
                yield replace(row, folder=self.folder)


def rows_of(path: str | os.PathLike[str], options: RowOptions) -> StoredRows:
    """Return the rows of a file, of all files in a folder, or of a saved dataset."""
    path = Path(path)
    folder = path if path.is_dir() else path.parent
    found = _rows_at(path, options.split)
    return replace(found, text_column=options.text_column, folder=folder)


def _rows_at(path: Path, split: str | None) -> StoredRows:
    if path.is_dir() and is_saved_dataset(path):
        return _of_dataset(path, split)
    if path.is_dir():
        return _of_folder(path, split)
    if split is not None:
        raise ConfigurationError(f"{path} is no folder, so it has no split {split!r}; leave it out")
    return _of_file(path, path.name)


def _of_file(path: Path, name: str) -> StoredRows:
    """Return the rows of a file.

    :param name: the name of the file in errors
    """
    kind = path.suffix.lower()
    if kind == ".parquet":
        return StoredRows(
            name=name,
            records=lambda column: _numbered(name, "row", parquet_records(path, column)),
            count=lambda: parquet_count(path),
        )
    if kind not in _LINES:
        raise ConfigurationError(
            f"{path} is neither .txt (one text per line), .jsonl (one text, chat or row of token "
            "ids per line) nor .parquet, nor a folder of these, nor a saved dataset; to calibrate "
            "on a single text, pass it in a list"
        )
    return StoredRows(
        name=name, records=lambda _: _records_of_lines(path, name), count=lambda: _count_lines(path)
    )


def _of_folder(folder: Path, split: str | None) -> StoredRows:
    known = {*_LINES, ".parquet"}
    files = sorted(file for file in folder.rglob("*") if file.suffix.lower() in known)
    if not files:
        raise ConfigurationError(
            f"{folder} has no .txt, .jsonl or .parquet file, and is no dataset that save_to_disk "
            "wrote"
        )
    chosen = [file for file in files if split is None or file.name.startswith(split)]
    if not chosen:
        names = ", ".join(file.name for file in files[:5])
        raise ConfigurationError(f"{folder} has no file of the split {split!r}, only {names}")
    parts = [_of_file(file, str(file.relative_to(folder))) for file in chosen]
    return StoredRows(
        name=folder.name or str(folder),
        records=lambda column: (record for part in parts for record in part.records(column)),
        count=lambda: sum(part.count() for part in parts),
    )


def _of_dataset(folder: Path, split: str | None) -> StoredRows:
    dataset, chosen = saved_dataset(folder, split)
    name = folder.name if chosen is None else f"{folder.name}, split {chosen}"
    return StoredRows(
        name=name,
        records=lambda _: _numbered(name, "row", iter(dataset)),
        count=lambda: len(dataset),
    )


def _numbered(name: str, word: str, records: Iterator[Any]) -> _Records:
    return ((f"{name}, {word} {number}", record) for number, record in enumerate(records, start=1))


def _records_of_lines(path: Path, name: str) -> _Records:
    parse = _LINES[path.suffix.lower()]
    for place, line in _numbered(name, "line", _lines(path, name)):
        if line.strip():
            yield place, parse(line, place)


def _count_lines(path: Path) -> int:
    """Count the lines of a file that are not blank, without reading the rows in them."""
    with open(path, "rb") as file:
        return sum(1 for line in file if line.strip())


def _lines(path: Path, name: str) -> Iterator[str]:
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                yield _decoded(line, number, name)
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {error.strerror}") from error


def _decoded(line: bytes, number: int, name: str) -> str:
    try:
        text = line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise ConfigurationError(
            f"{name}, line {number} is not UTF-8: byte {error.start + 1} is "
            f"{line[error.start]:#04x}; save the file as UTF-8"
        ) from error
    return text.rstrip("\r\n")


def _parse(line: str, place: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{place} is not JSON: {error}") from error


_LINES: dict[str, Callable[[str, str], Any]] = {".txt": lambda line, _: line, ".jsonl": _parse}
