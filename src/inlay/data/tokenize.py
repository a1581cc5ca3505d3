"""Rows of text, chat or token ids, and how they become a batch."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as short
from typing import Any, Literal

import torch

from inlay.errors import ConfigurationError

__all__ = ["Row", "Tokenization", "read_rows", "row_of"]

Encoded = dict[str, list[int]]

_IDS = ("input_ids", "attention_mask", "token_type_ids")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One sample before tokenizing and padding.

    :param place: location of the row for errors, such as "chat.jsonl, line 7"
    :param content: a text, a list of messages, or ids by their name
    """

    place: str
    kind: Literal["text", "messages", "input_ids"]
    content: Any


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
        ids = {name: _numbers(record[name], name, place) for name in _IDS if name in record}
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


@dataclass(frozen=True, kw_only=True)
class Tokenization:
    """The way rows become a batch.

    :param tokenizer: a tokenizer of transformers, or None if all rows are token ids
    :param max_length: tokens after which a row is cut, if the tokenizer does not cut earlier
    """

    tokenizer: Any
    max_length: int

    def batch(self, rows: Iterable[Row]) -> dict[str, torch.Tensor]:
        """Make one batch of rows, padded to the longest row, with padding masked out."""
        encoded = [self._encode(row) for row in rows]
        longest = max(len(row["input_ids"]) for row in encoded)
        names = [name for name in encoded[0] if all(name in row for row in encoded)]
        return {
            name: torch.tensor([self._padded(row[name], name, longest) for row in encoded])
            for name in names
        }

    def _encode(self, row: Row) -> Encoded:
        if row.kind == "input_ids":
            encoded = {name: ids[: self.max_length] for name, ids in row.content.items()}
        else:
            encoded = self._tokenized(row)
        ids = encoded["input_ids"]
        if not ids:
            raise ConfigurationError(f"{row.place} has no tokens; leave it out")
        encoded.setdefault("attention_mask", [1] * len(ids))
        for name, values in encoded.items():
            if len(values) != len(ids):
                raise ConfigurationError(
                    f"{row.place} has {len(ids)} input_ids but {len(values)} in {name}"
                )
        return encoded

    def _tokenized(self, row: Row) -> Encoded:
        if self.tokenizer is None:
            raise ConfigurationError(
                f"{row.place} is text, which needs a tokenizer; pass the model's own "
                "(tokenizer=…), or save it in the model's folder for the command line"
            )
        # Models have no positions beyond the length that their tokenizer knows.
        limit = getattr(self.tokenizer, "model_max_length", self.max_length)
        cut = {"truncation": True, "max_length": min(self.max_length, limit)}
        found = (
            self._chat(row, cut) if row.kind == "messages" else self.tokenizer(row.content, **cut)
        )
        return {name: list(found[name]) for name in _IDS if name in found}

    def _chat(self, row: Row, cut: dict[str, Any]) -> Any:
        if getattr(self.tokenizer, "chat_template", None) is None:
            raise ConfigurationError(
                f"{row.place} has messages, but the tokenizer has no chat template; set "
                "tokenizer.chat_template, or write the conversations out as text"
            )
        try:
            return self.tokenizer.apply_chat_template(
                row.content, tokenize=True, return_dict=True, **cut
            )
        except Exception as error:  # a template is a program and can raise anything
            raise ConfigurationError(
                f"{row.place} does not fit the tokenizer's chat template: {error}"
            ) from error

    def _padded(self, values: list[int], name: str, length: int) -> list[int]:
        # Pad on the right, whatever the tokenizer does for generation: then each token keeps its
        # position, even in models that compute positions without looking at the mask.
        return values + [self._padding_id() if name == "input_ids" else 0] * (length - len(values))

    def _padding_id(self) -> int:
        # Any id that exists will do, because the mask leaves it out.
        for name in ("pad_token_id", "eos_token_id"):
            found = getattr(self.tokenizer, name, None)
            if isinstance(found, int):
                return found
        return 0


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
