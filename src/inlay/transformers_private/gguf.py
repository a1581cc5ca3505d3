"""Private parts of transformers: how it converts tokenizers from GGUF."""

from typing import Any

__all__ = ["correct_tokenizer"]


def correct_tokenizer(tokenizer: Any, config: Any) -> None:
    """Correct two errors that the conversion from GGUF makes before transformers 5.23.

    It may take the end token of a text for the start token, so special tokens come from the file's
    metadata. It also removes spaces before punctuation, which is right only for WordPiece. Remove
    this once 5.23 is the oldest release supported.
    """
    for role in ("bos", "eos", "unk", "pad"):
        number = getattr(config, f"{role}_token_id", None)
        if isinstance(number, int):
            setattr(tokenizer, f"{role}_token", tokenizer.convert_ids_to_tokens(number))
    tokenizer.clean_up_tokenization_spaces = False
