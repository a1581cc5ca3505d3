"""How rows of text, chat or token ids become a batch."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from inlay.data.audio import waveform
from inlay.data.media import with_images
from inlay.data.rows import ID_NAMES, Row
from inlay.errors import ConfigurationError

__all__ = ["Tokenization"]

Encoded = dict[str, list[int]]


@dataclass(frozen=True, kw_only=True)
class Tokenization:
    """The way rows become a batch.

    :param tokenizer: a tokenizer or processor of transformers, or None if all rows are token ids
    :param max_length: tokens after which a row is cut, if the tokenizer does not cut earlier
    """

    tokenizer: Any
    max_length: int

    def batch(self, rows: Iterable[Row]) -> dict[str, torch.Tensor]:
        """Make one batch of rows, padded to the longest row, with padding masked out."""
        rows = list(rows)
        if any(row.kind == "audio" for row in rows):
            return self._heard(rows)
        if any(row.kind == "media" for row in rows):
            return self._processed(rows)
        encoded = [self._encode(row) for row in rows]
        longest = max(len(row["input_ids"]) for row in encoded)
        names = [name for name in encoded[0] if all(name in row for row in encoded)]
        return {
            name: torch.tensor([self._padded(row[name], name, longest) for row in encoded])
            for name in names
        }

    def _processed(self, rows: list[Row]) -> dict[str, torch.Tensor]:
        """Let the processor make a batch of rows with images. It is not cut, as no image can be."""
        place = rows[0].place
        if not hasattr(self.tokenizer, "image_processor"):
            raise ConfigurationError(
                f"{place} has images, which need a processor; pass the model's own (processor=…), "
                "or save it in the model's folder for the command line"
            )
        kinds = {(row.kind, *row.content) if row.kind == "media" else (row.kind,) for row in rows}
        if len(kinds) > 1:
            raise ConfigurationError(
                f"{place} and other rows of its batch are of different kinds; use batch_size=1"
            )
        contents = [with_images(row.content, row.folder, row.place) for row in rows]
        padding = {"padding": len(rows) > 1, "padding_side": "right", "return_tensors": "pt"}
        try:
            if "messages" in contents[0]:
                found = self.tokenizer.apply_chat_template(
                    [content["messages"] for content in contents],
                    tokenize=True,
                    return_dict=True,
                    processor_kwargs=padding,
                )
            else:
                found = self.tokenizer(
                    text=[content["text"] for content in contents],
                    images=[content["images"] for content in contents],
                    **padding,
                )
        except Exception as error:  # a template is a program and can raise anything
            raise ConfigurationError(f"{place} does not fit the processor: {error}") from error
        return {name: each for name, each in found.items() if isinstance(each, torch.Tensor)}

    def _heard(self, rows: list[Row]) -> dict[str, torch.Tensor]:
        """Return the features of a recording, and its text as the tokens that a decoder reads."""
        row = rows[0]
        if len(rows) > 1:
            raise ConfigurationError(f"{row.place} is a recording; use batch_size=1")
        extractor = getattr(self.tokenizer, "feature_extractor", None)
        if extractor is None:
            raise ConfigurationError(
                f"{row.place} is a recording, which needs a processor; pass the model's own "
                "(processor=…), or save it in the model's folder for the command line"
            )
        rate = extractor.sampling_rate
        samples = waveform(row.content["audio"], row.folder, row.place, rate)
        found = extractor(samples.numpy(), sampling_rate=rate, return_tensors="pt")
        ids = self._for_text(row.content["text"], truncation=True, max_length=self.max_length)
        if not ids["input_ids"]:
            raise ConfigurationError(
                f"{row.place} has no tokens of text; add the text that is said"
            )
        return {"decoder_input_ids": torch.tensor([list(ids["input_ids"])]), **found}

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
        limit = getattr(self._for_text, "model_max_length", self.max_length)
        cut = {"truncation": True, "max_length": min(self.max_length, limit)}
        found = (
            self._chat(row, cut) if row.kind == "messages" else self._for_text(row.content, **cut)
        )
        return {name: list(found[name]) for name in ID_NAMES if name in found}

    def _chat(self, row: Row, cut: dict[str, Any]) -> Any:
        if getattr(self.tokenizer, "chat_template", None) is None:
            raise ConfigurationError(
                f"{row.place} has messages, but the tokenizer has no chat template; set "
                "tokenizer.chat_template, or write the conversations out as text"
            )
        try:
            return self._for_text.apply_chat_template(
                row.content,
                chat_template=self.tokenizer.chat_template,
                tokenize=True,
                return_dict=True,
                **cut,
            )
        except Exception as error:  # a template is a program and can raise anything
            raise ConfigurationError(
                f"{row.place} does not fit the tokenizer's chat template: {error}"
            ) from error

    @property
    def _for_text(self) -> Any:
        """The tokenizer, which may be that of a processor."""
        return getattr(self.tokenizer, "tokenizer", self.tokenizer)

    def _padded(self, values: list[int], name: str, length: int) -> list[int]:
        # Pad on the right, whatever the tokenizer does for generation: then each token keeps its
        # position, even in models that compute positions without looking at the mask.
        return values + [self._padding_id() if name == "input_ids" else 0] * (length - len(values))

    def _padding_id(self) -> int:
        # Any id that exists will do, because the mask leaves it out.
        for name in ("pad_token_id", "eos_token_id"):
            found = getattr(self._for_text, name, None)
            if isinstance(found, int):
                return found
        return 0
