"""Measures of how the output of a model changed, accumulated batch by batch."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
import torch.nn.functional as F

from inlay.report.data import Change, Finding

__all__ = ["NO_LABEL", "Choices", "Measure", "Vectors", "chunks", "next_tokens"]

NO_LABEL = -100  # marks a position without a label, as in transformers
# Numbers compared at a time: 16 MB in float32, of which there are several copies, while the logits
# of a batch may be gigabytes.
_CHUNK = 1 << 22


def chunks(rows: int, columns: int) -> Iterator[slice]:
    """Cut rows into slices small enough to be compared in float32."""
    step = max(1, _CHUNK // max(1, columns))
    return (slice(start, start + step) for start in range(0, rows, step))


def next_tokens(ids: torch.Tensor, counted: torch.Tensor | None) -> torch.Tensor:
    """Return the token after each position where both count, and `NO_LABEL` elsewhere."""
    labels = torch.full_like(ids, NO_LABEL)
    labels[:, :-1] = ids[:, 1:]
    if counted is not None:
        labels[:, :-1].masked_fill_(~(counted[:, :-1] & counted[:, 1:]), NO_LABEL)
    return labels


class Measure(ABC):
    """A comparison of output rows that counts and leaves out rows with NaN or Inf."""

    def __init__(self, unit: str) -> None:
        self.unit = unit
        self.rows = 0  # compared so far
        self.broken_before = 0
        self.broken_after = 0

    @abstractmethod
    def changes(self) -> list[Change]:
        """Return what was measured, the most telling first."""

    def findings(self) -> list[Finding]:
        total = self.rows + self.broken_before + self.broken_after
        found = []
        if self.broken_before:
            found.append(
                f"Before quantization the model already gave NaN or Inf at "
                f"{self.broken_before:,} of {total:,} {self.unit}, which are left out of the "
                "comparison; check the model and its dtype first."
            )
        if self.broken_after:
            found.append(
                f"The quantized model gives NaN or Inf at {self.broken_after:,} of {total:,} "
                f"{self.unit} where the model gave numbers; they are left out of the comparison. "
                "Do not use the quantized model like this."
            )
        return [Finding(severity="warning", text=text) for text in found]

    def _usable(self, before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
        """Mark the rows that can be compared: those whose two given numbers are finite."""
        before, after = torch.isfinite(before), torch.isfinite(after)
        self.broken_before += int((~before).sum())
        self.broken_after += int((before & ~after).sum())
        usable = before & after
        self.rows += int(usable.sum())
        return usable

    def _over(self) -> str:
        return f"over {self.rows:,} {self.unit}"


class Choices(Measure):
    """A comparison of logits: their choices, their probabilities, and how likely labels are."""

    def __init__(self, unit: str = "positions") -> None:
        super().__init__(unit)
        self._same = 0
        self._divergence = 0.0
        self._labels = 0
        self._surprise_before = 0.0
        self._surprise_after = 0.0

    def add(
        self, before: torch.Tensor, after: torch.Tensor, labels: torch.Tensor | None = None
    ) -> None:
        """Compare logits of shape (rows, choices).

        :param labels: the right choice of each row, or `NO_LABEL`
        """
        for rows in chunks(*before.shape):
            part = None if labels is None else labels[rows]
            self._add(before[rows].float(), after[rows].float(), part)

    def _add(self, before: torch.Tensor, after: torch.Tensor, labels: torch.Tensor | None) -> None:
        usable = self._usable(before.logsumexp(-1), after.logsumexp(-1))
        before, after = before[usable], after[usable]
        self._same += int((before.argmax(-1) == after.argmax(-1)).sum())
        before, after = before.log_softmax(-1), after.log_softmax(-1)
        if labels is not None:
            self._add_surprise(before, after, labels[usable])
        moved = before.exp() * (before - after)
        # A logit of -Inf rules a choice out, so it weighs nothing.
        moved = moved.masked_fill_(before == -math.inf, 0)
        self._divergence += float(moved.sum(-1).clamp_(min=0).sum(dtype=torch.float64))

    def _add_surprise(
        self, before: torch.Tensor, after: torch.Tensor, labels: torch.Tensor
    ) -> None:
        known = labels != NO_LABEL
        labels = labels[known].unsqueeze(-1)
        self._labels += labels.numel()
        self._surprise_before -= float(before[known].gather(-1, labels).sum(dtype=torch.float64))
        self._surprise_after -= float(after[known].gather(-1, labels).sum(dtype=torch.float64))

    def changes(self) -> list[Change]:
        if not self.rows:
            return []
        found = [
            Change(
                name="Top-1 agreement",
                explanation=f"How often both models choose the same, {self._over()}. 1 is best.",
                value=self._same / self.rows,
            ),
            Change(
                name="KL divergence",
                explanation="How far the predicted probabilities moved, in nats, on average "
                f"{self._over()}. 0 is best.",
                value=self._divergence / self.rows,
            ),
        ]
        if self._labels:
            found.append(
                Change(
                    name="Perplexity",
                    explanation=f"How surprised the model is by a token of the held-out text, over "
                    f"{self._labels:,} tokens. Lower is better.",
                    before=_exp(self._surprise_before / self._labels),
                    after=_exp(self._surprise_after / self._labels),
                )
            )
        return found


class Vectors(Measure):
    """A comparison of hidden states or embeddings: their direction and the size of the error."""

    def __init__(self, unit: str, *, of: str) -> None:
        super().__init__(unit)
        self._of = of
        self._has_direction = True
        self._cosine = 0.0
        self._signal = 0.0
        self._error = 0.0

    def add(self, before: torch.Tensor, after: torch.Tensor) -> None:
        """Compare vectors of shape (rows, features)."""
        before, after = before.float(), after.float()
        usable = self._usable(before.sum(-1), after.sum(-1))
        before, after = before[usable], after[usable]
        self._has_direction &= before.size(-1) > 1
        self._cosine += float(_cosine(before, after).sum(dtype=torch.float64))
        self._signal += _power(before)
        self._error += _power(after - before)

    def changes(self) -> list[Change]:
        if not self.rows:
            return []
        found = []
        if self._has_direction:
            found.append(
                Change(
                    name=f"Cosine similarity, {self.unit}",
                    explanation=f"Of {self._of} of both models, on average {self._over()}. "
                    "1 is best.",
                    value=self._cosine / self.rows,
                )
            )
        if self._signal > 0 or self._error == 0:
            error = math.sqrt(self._error / self._signal) if self._error else 0.0
            found.append(
                Change(
                    name=f"Relative error, {self.unit}",
                    explanation=f"The length of the error over the length of {self._of}, "
                    f"{self._over()}. 0 is best.",
                    value=error,
                )
            )
        return found


def _cosine(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """Return the cosine of each pair; two vectors of zeros point the same way."""
    cosine = F.cosine_similarity(before, after, dim=-1).clamp(-1, 1)
    return cosine.masked_fill_((before == after).all(-1), 1)


def _power(values: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(values, dtype=torch.float64)) ** 2


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf
