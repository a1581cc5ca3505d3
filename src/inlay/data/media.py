"""Images in rows: found in records, and read from disk. Importing this takes no time."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from inlay.errors import ConfigurationError

__all__ = ["media_of", "with_images"]

_MARK = "<image>"
_KEYS = ("image", "path", "url", "image_url", "bytes")


def media_of(record: Mapping[str, Any], text_column: str, place: str) -> dict[str, Any] | None:
    """Return the text or messages of a record with images, and the images; None if it has none.

    Images are parts of messages, as in the chat format of transformers, or beside them in `images`
    or `image`. Those beside messages take the places of `<image>` in these.
    """
    beside = record.get("images") or ([record["image"]] if record.get("image") is not None else [])
    messages = record.get("messages")
    if isinstance(messages, Sequence) and messages:
        if beside:
            return {"messages": _with_parts(messages, list(beside), place)}
        return {"messages": list(messages)} if any(map(_has_image, messages)) else None
    if not beside:
        return None
    text = record.get(text_column)
    if not isinstance(text, str):
        raise ConfigurationError(f"{place} has images without {text_column} or messages")
    return {"text": text, "images": list(beside)}


def with_images(content: Mapping[str, Any], folder: Path | None, place: str) -> dict[str, Any]:
    """Return the same content with its images read.

    :param folder: paths are relative to it
    """
    if "images" in content:
        return {**content, "images": [_read(each, folder, place) for each in content["images"]]}
    messages = []
    for message in content["messages"]:
        parts = message["content"]
        if isinstance(parts, str):
            parts = [{"type": "text", "text": parts}]
        read = [
            {"type": "image", "image": _read(_raw(part), folder, place)}
            if _is_image(part)
            else part
            for part in parts
        ]
        messages.append({**message, "content": read})
    return {"messages": messages}


def _has_image(message: Any) -> bool:
    parts = message.get("content") if isinstance(message, Mapping) else None
    return isinstance(parts, Sequence) and not isinstance(parts, str) and any(map(_is_image, parts))


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in ("image", "image_url")


def _raw(part: Mapping[str, Any]) -> Any:
    """Return what a part of a message says of its image."""
    found = next((part[key] for key in _KEYS if part.get(key) is not None), None)
    if isinstance(found, Mapping) and "url" in found:  # as servers take it
        return found["url"]
    return found


def _with_parts(messages: Sequence[Any], images: list[Any], place: str) -> list[dict[str, Any]]:
    """Put images in the places that messages mark, or before the first message without marks."""
    marks = sum(str(message.get("content")).count(_MARK) for message in messages)
    if marks not in (0, len(images)):
        raise ConfigurationError(f"{place} has {len(images)} images and {marks} times {_MARK}")
    left = list(images)
    found = []
    for message in messages:
        parts: list[dict[str, Any]] = []
        if not marks and left:
            parts, left = [{"type": "image", "image": image} for image in left], []
        for number, text in enumerate(str(message["content"]).split(_MARK)):
            if number:
                parts.append({"type": "image", "image": left.pop(0)})
            if text.strip():
                parts.append({"type": "text", "text": text.strip()})
        found.append({**message, "content": parts})
    return found


def _read(raw: Any, folder: Path | None, place: str) -> Any:
    """Return an image of Pillow for a path, bytes, or an image."""
    if isinstance(raw, Mapping):  # as datasets store it
        raw = raw.get("bytes") or raw.get("path")
    if hasattr(raw, "convert"):
        return raw.convert("RGB")
    try:
        from PIL import Image
    except ImportError as error:
        raise ConfigurationError(
            f"{place} has an image, which needs Pillow: pip install pillow"
        ) from error
    if isinstance(raw, str):
        if "://" in raw:
            raise ConfigurationError(
                f"{place}: {raw} is not downloaded; save the image and give its path"
            )
        source: Any = Path(raw) if folder is None else folder / raw
    elif isinstance(raw, bytes):
        source = io.BytesIO(raw)
    else:
        raise ConfigurationError(
            f"{place}: an image is a {type(raw).__name__}, not a path or bytes"
        )
    try:
        with Image.open(source) as image:
            return image.convert("RGB")
    except OSError as error:
        raise ConfigurationError(f"{place}: cannot read the image {raw!r:.80}: {error}") from error
