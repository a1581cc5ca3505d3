"""Advice on texts that are unlike what the model will be served with."""

from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from torch import nn

from inlay.data.batch import Batch
from inlay.data.rows import Row

__all__ = ["advice_on_lengths", "advice_on_template"]

# Texts this many times shorter than the context leave most positions unseen.
_FAR_SHORTER = 16
_PROBE = "Inlay"


def advice_on_template(rows: Sequence[Row], tokenizer: Any) -> tuple[str, ...]:
    """Return advice if texts have no mark of the chat template that the tokenizer has."""
    texts = [row.content for row in rows if row.kind == "text"]
    marks = _marks(getattr(tokenizer, "tokenizer", tokenizer)) if texts else []
    marked = sum(any(mark in text for mark in marks) for text in texts)
    if not marks or marked:
        return ()
    return (
        f"None of {len(texts):,} texts has {' or '.join(marks[:3])} of the tokenizer's chat "
        "template. If the model is to serve chats, give rows with messages: activations of a chat "
        "differ from those of plain text",
    )


def advice_on_lengths(model: nn.Module, batches: Iterable[Batch], max_length: int) -> str | None:
    """Return advice if rows are far shorter than the context of a language model."""
    config = getattr(model, "config", None)
    if config is None or not getattr(model, "can_generate", lambda: False)():
        return None
    known = getattr(config.get_text_config(), "max_position_embeddings", None)
    context = min(known, max_length) if isinstance(known, int) else max_length
    masks = [batch.get("attention_mask") for batch in batches if isinstance(batch, dict)]
    lengths = [int(n) for mask in masks if mask is not None for n in mask.flatten(1).sum(1)]
    middle = median(lengths) if lengths else context
    if middle * _FAR_SHORTER > context:
        return None
    served = f"; the model is served with up to {known:,}" if isinstance(known, int) else ""
    return (
        f"Half of the rows have at most {middle:.0f} tokens, {middle / context:.1%} "
        f"of the {context:,} that one may have{served}. Give longer texts: activations at later "
        "positions differ from those at the first"
    )


def _marks(tokenizer: Any) -> list[str]:
    """Return the special tokens that the chat template writes around a message."""
    if getattr(tokenizer, "chat_template", None) is None:
        return []
    message = {"role": "user", "content": _PROBE}
    try:
        shown = tokenizer.apply_chat_template([message], tokenize=False)
    except Exception:  # a template is a program; rows with messages show its error
        return []
    # Every text starts with the first token of texts, whatever its kind.
    special = set(tokenizer.get_added_vocab()) - {getattr(tokenizer, "bos_token", None)}
    return sorted((token for token in special if token in shown), key=shown.index)
