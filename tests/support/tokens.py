"""A tokenizer small enough to know by heart: the word `w7` is the id 7."""

from typing import Any

WORDS = 60
UNKNOWN, END, PADDING = WORDS, WORDS + 1, WORDS + 2
CHAT = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"


def word_tokenizer(**changes: Any) -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    vocabulary = {f"w{index}": index for index in range(WORDS)}
    special = {"<unk>": UNKNOWN, "<end>": END, "<pad>": PADDING}
    backend = Tokenizer(WordLevel({**vocabulary, **special}, unk_token="<unk>"))
    backend.pre_tokenizer = WhitespaceSplit()
    fields = {"unk_token": "<unk>", "eos_token": "<end>", "pad_token": "<pad>", **changes}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **fields)


def text_of(ids: list[int]) -> str:
    return " ".join(f"w{index}" for index in ids)
