"""Rows of text, chat or token ids. Importing this takes no time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from reprlib import repr as short
from typing import Any, Literal

from inlay.errors import ConfigurationError

__all__ = ["COLUMNS", "ID_NAMES", "Row", "row_of"]

ID_NAMES = ("input_ids", "attention_mask", "token_type_ids")
# What a row may have. Readers of tables leave out the rest.
COLUMNS = ("text", "messages", *ID_NAMES)


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


def _numbers(values: Any, name: str, place: str) -> list[int]:
    values = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(values, list) or not all(type(value) is int for value in values):
        raise ConfigurationError(
            f"{place}: {name} must be a list of whole numbers, got {short(values)}"
        )
    return values
