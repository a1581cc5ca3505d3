"""Comparing language models: their predictions of each next token of the data."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from inlay.comparison.predictions import Logits, Prediction
from inlay.comparison.result import Choice, Position, SpecialToken
from inlay.evaluation.measures import NO_LABEL, Choices, Compared
from inlay.report.data import Estimate

__all__ = ["LanguageComparison", "special_tokens_of"]

_CONTEXT = 24  # tokens of text that are shown before a position
_CHOICES = 3  # tokens that are shown of each model
# A token that nobody expects or chooses, and that is less probable than this, is not shown.
_RARE = 1e-3


class LanguageComparison:
    """Predictions of two language models, compared row by row.

    :param tokenizer: decodes tokens for display; None shows ids
    :param special: ids of special tokens, by their text
    :param worst: how many of the worst positions to keep
    """

    def __init__(self, tokenizer: Any, special: Mapping[str, int], worst: int) -> None:
        self.choices = Choices()
        self.rows = 0
        self.is_bound = False
        self._tokenizer = tokenizer
        self._special = {token: _Special(token, number) for token, number in special.items()}
        self._kept = worst
        self._worst: list[Position] = []

    def add(self, ids: torch.Tensor, before: Logits, after: Prediction) -> None:
        """Compare the predictions for a row: of the token after each of its tokens.

        :param ids: the tokens of the row. The last may have no prediction
        """
        self.rows += 1
        self.is_bound |= not isinstance(after, Logits)
        labels = torch.full_like(ids, NO_LABEL)
        labels[:-1] = ids[1:]
        labels = labels[: len(before.values)]
        compared = after.compared_with(before, labels)
        self.choices.add_compared(compared, torch.zeros_like(labels))
        usable = compared.before & compared.after
        for special in self._special.values():
            special.add(before, after, labels, usable)
        self._keep_worst(ids, compared, before, after, usable)

    def estimates(self) -> dict[str, Estimate]:
        names = {"perplexity_before": "perplexity_a", "perplexity_after": "perplexity_b"}
        found = {names.get(name, name): each for name, each in self.choices.estimates().items()}
        for name in ("kl", "kl_reverse"):
            if self.is_bound and name in found:
                bound = found[name]
                found[name] = Estimate(value=bound.value, interval=bound.interval, is_bound=True)
        return found

    def special_tokens(self) -> tuple[SpecialToken, ...]:
        found = (each.result(self.is_bound) for each in self._special.values())
        return tuple(
            each
            for each in found
            if each.expected
            or each.chosen_a
            or each.chosen_b
            or max(each.elsewhere_a or 0, each.elsewhere_b or 0) >= _RARE
        )

    def worst(self) -> tuple[Position, ...]:
        return tuple(self._worst)

    def _keep_worst(
        self,
        ids: torch.Tensor,
        compared: Compared,
        before: Logits,
        after: Prediction,
        usable: torch.Tensor,
    ) -> None:
        apart = compared.divergence.masked_fill(~usable, -1)
        found = apart.topk(min(self._kept, len(apart)))
        least = self._worst[-1].kl if len(self._worst) == self._kept else 0.0
        new = [
            self._position(ids, place, kl, before, after)
            for kl, place in zip(found.values.tolist(), found.indices.tolist(), strict=True)
            if kl > least
        ]
        ranked = sorted([*self._worst, *new], key=lambda each: (-each.kl, each.row, each.token))
        self._worst = ranked[: self._kept]

    def _position(
        self, ids: torch.Tensor, place: int, kl: float, before: Logits, after: Prediction
    ) -> Position:
        has_next = place + 1 < len(ids)
        token = int(ids[place + 1]) if has_next else -1
        return Position(
            row=self.rows,
            token=place + 2,
            kl=kl,
            text=self._text(ids[max(0, place + 1 - _CONTEXT) : place + 1].tolist()),
            expected=Choice(token=self._text([token]), probability=float(before.of(token)[place]))
            if has_next
            else None,
            expected_b=float(after.of(token)[place]) if has_next else None,
            top_a=self._shown(before.top(place, _CHOICES)),
            top_b=self._shown(after.top(place, _CHOICES)),
        )

    def _shown(self, top: Iterable[tuple[int, float]]) -> tuple[Choice, ...]:
        return tuple(Choice(token=self._text([token]), probability=p) for token, p in top)

    def _text(self, ids: Sequence[int]) -> str:
        if self._tokenizer is None:
            return " ".join(map(str, ids))
        text = str(self._tokenizer.decode(ids, clean_up_tokenization_spaces=False))
        # A padded vocabulary has tokens without a text.
        return text or " ".join(f"<{each}>" for each in ids)


class _Special:
    """Sums of what both models say of a special token."""

    def __init__(self, token: str, number: int) -> None:
        self._token, self._number = token, number
        self._expected = self._elsewhere = 0
        self._chosen = [0, 0, 0]  # by A, by B, by both
        self._sums = {key: [0.0, 0.0] for key in ("expected", "elsewhere")}

    def add(
        self, before: Prediction, after: Prediction, labels: torch.Tensor, usable: torch.Tensor
    ) -> None:
        first = [(each.first() == self._number) & usable for each in (before, after)]
        masks = {
            "expected": (labels == self._number) & usable,
            "elsewhere": (labels != self._number) & (labels != NO_LABEL) & usable,
        }
        self._expected += int(masks["expected"].sum())
        self._elsewhere += int(masks["elsewhere"].sum())
        for place, chosen in enumerate((*first, first[0] & first[1])):
            self._chosen[place] += int(chosen.sum())
        for side, prediction in enumerate((before, after)):
            probability = prediction.of(self._number)
            for key, mask in masks.items():
                self._sums[key][side] += float(probability[mask].sum(dtype=torch.float64))

    def result(self, is_bound: bool) -> SpecialToken:
        expected = [_mean(each, self._expected) for each in self._sums["expected"]]
        elsewhere = [_mean(each, self._elsewhere) for each in self._sums["elsewhere"]]
        return SpecialToken(
            token=self._token,
            id=self._number,
            expected=self._expected,
            expected_a=expected[0],
            expected_b=expected[1],
            chosen_a=self._chosen[0],
            chosen_b=self._chosen[1],
            chosen_both=self._chosen[2],
            elsewhere_a=elsewhere[0],
            elsewhere_b=elsewhere[1],
            is_bound=is_bound,
        )


def _mean(total: float, count: int) -> float | None:
    return total / count if count else None


def special_tokens_of(model: Any, tokenizer: Any) -> dict[str, int]:
    """Return the special tokens that a model may say: those that end a text, and those of chats."""
    found: dict[str, int] = {}
    if tokenizer is not None:
        template = str(getattr(tokenizer, "chat_template", None) or "")
        for number, added in sorted(tokenizer.added_tokens_decoder.items()):
            if number in tokenizer.all_special_ids or str(added) in template:
                found[str(added)] = number
    ends = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    for number in ends if isinstance(ends, list) else [ends]:
        if isinstance(number, int) and number not in found.values():
            name = f"token {number}" if tokenizer is None else tokenizer.decode([number])
            found[str(name)] = number
    return found
