"""Rows of text, chat or token ids. Importing this takes no time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as short
from typing import Any, Literal

from inlay.data.media import media_of
from inlay.errors import ConfigurationError

__all__ = ["COLUMNS", "ID_NAMES", "TEXT", "Row", "row_of"]

ID_NAMES = ("input_ids", "attention_mask", "token_type_ids")
TEXT = "text"
# What a row may have besides a text. Readers of tables leave out the rest.
COLUMNS = ("messages", "images", "image", "audio", *ID_NAMES)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One sample before tokenizing and padding.

    :param place: location of the row for errors, such as "chat.jsonl, line 7"
    :param content: a text, a list of messages, ids by their name, a text or messages with images,
        or a recording with its text
    :param folder: paths in the row are relative to it
    """

    place: str
    kind: Literal["text", "messages", "input_ids", "media", "audio"]
    content: Any
    folder: Path | None = None

    @property
    def nouns(self) -> str:
        """What rows of this kind are called."""
        return _NOUNS[self.kind]


_NOUNS = {
    "text": "texts",
    "messages": "chats",
    "input_ids": "rows of token ids",
    "media": "rows with images",
    "audio": "recordings",
}


def row_of(record: Any, place: str, text_column: str = TEXT) -> Row | None:
    """Turn a text or a mapping into a row; return None for a blank text.

    :param text_column: the key of the text in a mapping
    """
    if isinstance(record, str):
        return Row(place=place, kind="text", content=record) if record.strip() else None
    if not isinstance(record, Mapping):
        raise ConfigurationError(
            f"{place} is a {type(record).__name__}; expected a text, or a mapping with "
            f"{text_column}, messages or input_ids"
        )
    if record.get("input_ids") is not None:
        ids = {name: _numbers(record[name], name, place) for name in ID_NAMES if name in record}
        return Row(place=place, kind="input_ids", content=ids)
    if record.get("audio") is not None:
        content = {"audio": record["audio"], "text": record.get(text_column) or ""}
        return Row(place=place, kind="audio", content=content)
    media = media_of(record, text_column, place)
    if media is not None:
        return Row(place=place, kind="media", content=media)
    text = record.get(text_column)
    if isinstance(text, str):
        return row_of(text, place)
    if isinstance(record.get("messages"), Sequence) and record["messages"]:
        return Row(place=place, kind="messages", content=list(record["messages"]))
    if text is not None:
        raise ConfigurationError(f"{place}: {text_column} must be a text, got {short(text)}")
    raise ConfigurationError(
        f"{place} has {', '.join(map(str, record)) or 'nothing'}; expected {text_column}, messages "
        "or input_ids. Name the column with the texts: text_column=… (--text-column)"
    )


def _numbers(values: Any, name: str, place: str) -> list[int]:
    values = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(values, list) or not all(type(value) is int for value in values):
        raise ConfigurationError(
            f"{place}: {name} must be a list of whole numbers, got {short(values)}"
        )
    return values
