"""Differences of the tokenizers of two models, and what they make of the data."""

import os
from collections.abc import Iterator
from itertools import takewhile, zip_longest
from typing import Any

from inlay.comparison.configs import shown
from inlay.data.batch import main_tensor
from inlay.data.sources import Batches, batches_of
from inlay.errors import InlayError
from inlay.options import CompareOptions, RowOptions, keywords_of
from inlay.report.data import Finding

__all__ = ["rows_that_differ", "tokenizer_differences"]

_ROLES = ("bos_token", "eos_token", "pad_token", "unk_token")
_ABOUT = "tokenizer"
_BEFORE = 20  # characters that are shown before the first one that differs


def tokenizer_differences(a: Any, b: Any) -> Iterator[Finding]:
    """Find differences of vocabulary, special tokens and chat template.

    :param a: the tokenizer of A, or None
    """
    if a is None or b is None:
        if (a is None) != (b is None):
            missing = "A" if a is None else "B"
            yield Finding(severity="note", about=_ABOUT, text=f"{missing} has no tokenizer.")
        return
    first, second = a.get_vocab(), b.get_vocab()
    unlike = sorted(
        token for token in first.keys() | second if first.get(token) != second.get(token)
    )
    if unlike:
        yield _warning(
            f"{len(unlike):,} tokens have another id or are missing on one side, such as "
            f"{shown(unlike[0])}: {first.get(unlike[0])} in A, {second.get(unlike[0])} in B."
        )
    for role in _ROLES:
        if getattr(a, role, None) != getattr(b, role, None):
            sides = [shown(getattr(each, role, None)) for each in (a, b)]
            yield _warning(f"{role} is {sides[0]} in A and {sides[1]} in B.")
    yield from _template(getattr(a, "chat_template", None), getattr(b, "chat_template", None))


def _template(a: Any, b: Any) -> Iterator[Finding]:
    if a == b:
        return
    if a is None or b is None:
        side = "A" if a is None else "B"
        yield Finding(
            severity="warning", about="chat template", text=f"{side} has no chat template."
        )
        return
    lines = zip_longest(str(a).splitlines(), str(b).splitlines())
    number, (first, second) = next(
        (number, pair) for number, pair in enumerate(lines, 1) if pair[0] != pair[1]
    )
    alike = takewhile(lambda pair: pair[0] == pair[1], zip(first or "", second or "", strict=False))
    start = max(0, len(list(alike)) - _BEFORE)
    parts = [shown(None if line is None else line[start:]) for line in (first, second)]
    yield Finding(
        severity="warning",
        about="chat template",
        text=f"It differs from line {number} on: {parts[0]} in A, {parts[1]} in B. Chats reach the "
        "models as different tokens; use the template that the model was trained with.",
    )


def rows_that_differ(
    data: Any, batches: Batches, tokenizer: Any, options: CompareOptions
) -> Iterator[Finding]:
    """Count the batches of the data that are other tokens to B.

    :param batches: the data as the tokenizer of A reads it
    :param tokenizer: that of B, or None
    """
    can_repeat = isinstance(data, (str, os.PathLike, list, tuple))
    if tokenizer is None or not can_repeat:
        return
    try:
        others = batches_of(
            data,
            tokenizer=tokenizer,
            samples=options.samples,
            held_out=0,
            **keywords_of(options, RowOptions),
        )
        pairs = [
            (main_tensor(one), main_tensor(other))
            for one, other in zip(batches, others, strict=False)
        ]
    except InlayError as error:
        yield _warning(f"The tokenizer of B cannot read the data: {error}.")
        return
    unlike = [
        number
        for number, (one, other) in enumerate(pairs, 1)
        if one.shape != other.shape or not bool((one == other).all())
    ]
    if unlike:
        of = "rows" if options.batch_size == 1 else "batches"
        yield _warning(
            f"{len(unlike):,} of {len(pairs):,} {of} of the data are other tokens to B, the first "
            f"is number {unlike[0]}. Both models were given the tokens of A."
        )


def _warning(text: str) -> Finding:
    return Finding(severity="warning", about=_ABOUT, text=text)
