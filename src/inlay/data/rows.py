"""Rows of text, chat or token ids. Importing this takes no time."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as short
from typing import Any, Literal

from inlay.errors import ConfigurationError

__all__ = ["ID_NAMES", "Row", "count_rows", "read_rows", "row_of"]

ID_NAMES = ("input_ids", "attention_mask", "token_type_ids")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One sample before tokenizing and padding.

    :param place: location of the row for errors, such as "chat.jsonl, line 7"
    :param content: a text, a list of messages, or ids by their name
    """

    place: str
    kind: Literal["text", "messages", "input_ids"]
    content: Any

    @property
    def nouns(self) -> str:
        """What rows of this kind are called."""
        return {"text": "texts", "messages": "chats", "input_ids": "rows of token ids"}[self.kind]


def row_of(record: Any, place: str) -> Row | None:
    """Turn a text or a mapping into a row; return None for a blank text."""
    if isinstance(record, str):
        return Row(place=place, kind="text", content=record) if record.strip() else None
    if not isinstance(record, Mapping):
        raise ConfigurationError(
            f"{place} is a {type(record).__name__}; expected a text, or a mapping with text, "
            "messages or input_ids"
        )
    if record.get("input_ids") is not None:
        ids = {name: _numbers(record[name], name, place) for name in ID_NAMES if name in record}
        return Row(place=place, kind="input_ids", content=ids)
    if isinstance(record.get("text"), str):
        return row_of(record["text"], place)
    if isinstance(record.get("messages"), Sequence) and record["messages"]:
        return Row(place=place, kind="messages", content=list(record["messages"]))
    raise ConfigurationError(
        f"{place} has {', '.join(map(str, record)) or 'nothing'}; expected text, messages or "
        "input_ids"
    )


def read_rows(path: str | os.PathLike[str]) -> Iterator[Row]:
    """Read the rows of a `.txt` or `.jsonl` file one by one, skipping blank lines."""
    path = Path(path)
    if path.suffix.lower() not in (".txt", ".jsonl"):
        raise ConfigurationError(
            f"{path} is neither .txt (one text per line) nor .jsonl (one text, chat or row of "
            "token ids per line); to calibrate on a single text, pass it in a list"
        )
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        place = f"{path.name}, line {number}"
        record = _parse(line, place) if path.suffix.lower() == ".jsonl" else line
        row = row_of(record, place)
        if row is not None:
            yield row


def count_rows(path: str | os.PathLike[str]) -> int:
    """Count the lines of a file that are not blank, without reading the rows in them."""
    with open(path, "rb") as file:
        return sum(1 for line in file if line.strip())


def _lines(path: Path) -> Iterator[str]:
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                yield _decoded(line, number, path)
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {error.strerror}") from error


def _decoded(line: bytes, number: int, path: Path) -> str:
    try:
        text = line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise ConfigurationError(
            f"{path.name}, line {number} is not UTF-8: byte {error.start + 1} is "
            f"{line[error.start]:#04x}; save the file as UTF-8"
        ) from error
    return text.rstrip("\r\n")


def _parse(line: str, place: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{place} is not JSON: {error}") from error


def _numbers(values: Any, name: str, place: str) -> list[int]:
    values = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(values, list) or not all(type(value) is int for value in values):
        raise ConfigurationError(
            f"{place}: {name} must be a list of whole numbers, got {short(values)}"
        )
    return values
