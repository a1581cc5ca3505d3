"""Measures of how the output of a model changed, accumulated batch by batch."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F

from inlay.evaluation.intervals import RowSums, Totals
from inlay.report.data import Change, Estimate, Finding

__all__ = ["NO_LABEL", "Choices", "Compared", "Measure", "Vectors", "chunks", "next_tokens"]

NO_LABEL = -100  # marks a position without a label, as in transformers
# Numbers compared at a time: several copies of 4 MB fit into a cache, while the logits of a batch
# may be gigabytes.
_CHUNK = 1 << 20


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
    """A comparison of outputs that counts and leaves out positions with NaN or Inf.

    :param unit: what positions are called
    :param sums: names of the quantities that are summed for each row of data
    """

    def __init__(self, unit: str, *sums: str) -> None:
        self.unit = unit
        self.sums = RowSums("count", *sums)
        self.broken_before = 0
        self.broken_after = 0

    @property
    def count(self) -> int:
        """How many positions have been compared."""
        return round(self.sums.total("count"))

    @abstractmethod
    def estimates(self) -> dict[str, Estimate]:
        """Return what was measured, by name."""

    @abstractmethod
    def changes(self) -> list[Change]:
        """Return what was measured, the most telling first."""

    def findings(self) -> list[Finding]:
        total = self.count + self.broken_before + self.broken_after
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

    def _count(
        self,
        rows: torch.Tensor | None,
        before: torch.Tensor,
        after: torch.Tensor,
        **values: torch.Tensor,
    ) -> None:
        """Count the positions whose numbers are finite in both models, and add their values.

        :param rows: the row of data of each position; None if each is a row
        """
        self.broken_before += int((~before).sum())
        self.broken_after += int((before & ~after).sum())
        usable = before & after
        rows = torch.arange(len(usable), device=usable.device) if rows is None else rows
        values = {name: value.masked_fill(~usable, 0) for name, value in values.items()}
        self.sums.add(rows, count=usable, **values)

    def _over(self) -> str:
        return f"over {self.count:,} {self.unit}"


@dataclass(frozen=True, kw_only=True)
class Compared:
    """What two predictions for the same positions have in common, a number for each position.

    :param before: whether the first prediction is finite
    :param same: whether the first choices agree
    :param divergence: KL divergence of the second prediction from the first, in nats
    :param reverse: KL divergence of the first prediction from the second
    :param labels: whether there is a right choice
    :param surprise_before: its negative log-probability in the first prediction; else 0
    """

    before: torch.Tensor
    after: torch.Tensor
    same: torch.Tensor
    divergence: torch.Tensor
    reverse: torch.Tensor
    labels: torch.Tensor
    surprise_before: torch.Tensor
    surprise_after: torch.Tensor

    @classmethod
    def of(
        cls, before: torch.Tensor, after: torch.Tensor, labels: torch.Tensor | None = None
    ) -> "Compared":
        """Compare logits of shape (positions, choices).

        :param labels: the right choice of each position, or `NO_LABEL`
        """
        size = len(before)
        if labels is None:
            labels = torch.full((size,), NO_LABEL, device=before.device)
        parts = [
            cls._of(before[part].float(), after[part].float(), labels[part])
            for part in chunks(*before.shape)
        ]
        return cls.joined(parts)

    @classmethod
    def joined(cls, parts: Sequence["Compared"]) -> "Compared":
        """Put the positions of several comparisons one after another."""
        names = [field.name for field in fields(cls)]
        return cls(**{name: torch.cat([getattr(each, name) for each in parts]) for name in names})

    @classmethod
    def _of(cls, before: torch.Tensor, after: torch.Tensor, labels: torch.Tensor) -> "Compared":
        known = labels != NO_LABEL
        same = before.argmax(-1) == after.argmax(-1)
        before, after = before.log_softmax(-1), after.log_softmax(-1)
        apart = before - after
        right = labels.masked_fill(~known, 0).unsqueeze(-1)
        surprise = [-each.gather(-1, right).squeeze(-1) for each in (before, after)]
        return cls(
            before=~before.sum(-1).isnan(),
            after=~after.sum(-1).isnan(),
            same=same,
            divergence=_mean_under(before, apart),
            reverse=_mean_under(after, -apart),
            labels=known,
            surprise_before=surprise[0].masked_fill(~known, 0),
            surprise_after=surprise[1].masked_fill(~known, 0),
        )


def _mean_under(log_probabilities: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return the mean of values, at least 0; choices that are ruled out weigh nothing."""
    weighed = log_probabilities.exp() * values
    return weighed.masked_fill_(log_probabilities == -math.inf, 0).sum(-1).clamp_(min=0)


class Choices(Measure):
    """A comparison of logits: their choices, their probabilities, and how likely labels are."""

    def __init__(self, unit: str = "positions") -> None:
        super().__init__(
            unit, "same", "divergence", "reverse", "labels", "surprise_before", "surprise_after"
        )

    def add(
        self,
        before: torch.Tensor,
        after: torch.Tensor,
        labels: torch.Tensor | None = None,
        rows: torch.Tensor | None = None,
    ) -> None:
        """Compare logits of shape (positions, choices).

        :param labels: the right choice of each position, or `NO_LABEL`
        :param rows: the row of data of each position, numbered from 0 in each call; None if each
            is a row
        """
        self.add_compared(Compared.of(before, after, labels), rows)

    def add_compared(self, compared: Compared, rows: torch.Tensor | None = None) -> None:
        self._count(
            rows, **{field.name: getattr(compared, field.name) for field in fields(compared)}
        )

    def estimates(self) -> dict[str, Estimate]:
        if not self.count:
            return {}
        found = {
            "agreement": self.sums.estimate(lambda sums: sums["same"] / sums["count"]),
            "kl": self.sums.estimate(lambda sums: sums["divergence"] / sums["count"]),
            "kl_reverse": self.sums.estimate(lambda sums: sums["reverse"] / sums["count"]),
        }
        if self.sums.total("labels"):
            found |= {
                "perplexity_before": self.sums.estimate(_perplexity_before),
                "perplexity_after": self.sums.estimate(_perplexity_after),
                "perplexity_ratio": self.sums.estimate(_perplexity_ratio),
            }
        return found

    def changes(self) -> list[Change]:
        found = self.estimates()
        if not found:
            return []
        changes = [
            _change(
                "Top-1 agreement",
                f"How often both models choose the same, {self._over()}. 1 is best.",
                found["agreement"],
            ),
            _change(
                "KL divergence",
                "How far the predicted probabilities moved, in nats, on average "
                f"{self._over()}. 0 is best; 0.01 is about 1 % of perplexity.",
                found["kl"],
            ),
        ]
        if "perplexity_ratio" in found:
            before, after = found["perplexity_before"], found["perplexity_after"]
            tokens = round(self.sums.total("labels"))
            changes += [
                Change(
                    name="Perplexity",
                    explanation=f"How surprised the model is by a token of the held-out text, over "
                    f"{tokens:,} tokens. Lower is better.",
                    before=before.value,
                    after=after.value,
                    before_interval=before.interval,
                    after_interval=after.interval,
                ),
                _change(
                    "Perplexity ratio",
                    "Perplexity after over perplexity before. Its interval is of both models on "
                    "the same rows, so it tells more than theirs. 1 is best.",
                    found["perplexity_ratio"],
                ),
            ]
        return changes


def _perplexity_before(sums: Totals) -> torch.Tensor:
    return (sums["surprise_before"] / sums["labels"]).exp()


def _perplexity_after(sums: Totals) -> torch.Tensor:
    return (sums["surprise_after"] / sums["labels"]).exp()


def _perplexity_ratio(sums: Totals) -> torch.Tensor:
    return ((sums["surprise_after"] - sums["surprise_before"]) / sums["labels"]).exp()


def _change(name: str, explanation: str, estimate: Estimate) -> Change:
    return Change(
        name=name, explanation=explanation, value=estimate.value, interval=estimate.interval
    )


class Vectors(Measure):
    """A comparison of hidden states or embeddings: their direction and the size of the error."""

    def __init__(self, unit: str, *, of: str) -> None:
        super().__init__(unit, "cosine", "signal", "error")
        self._of = of
        self._has_direction = True

    def add(
        self, before: torch.Tensor, after: torch.Tensor, rows: torch.Tensor | None = None
    ) -> None:
        """Compare vectors of shape (positions, features).

        :param rows: the row of data of each vector, numbered from 0 in each call; None if each is
            a row
        """
        before, after = before.float(), after.float()
        self._has_direction &= before.size(-1) > 1
        self._count(
            rows,
            torch.isfinite(before.sum(-1)),
            torch.isfinite(after.sum(-1)),
            cosine=_cosine(before, after),
            signal=_power(before),
            error=_power(after - before),
        )

    def estimates(self) -> dict[str, Estimate]:
        if not self.count:
            return {}
        found = {}
        if self._has_direction:
            found["cosine"] = self.sums.estimate(lambda sums: sums["cosine"] / sums["count"])
        if self.sums.total("signal") > 0 or self.sums.total("error") == 0:
            found["relative_error"] = self.sums.estimate(_relative_error)
        return found

    def changes(self) -> list[Change]:
        found, changes = self.estimates(), []
        if "cosine" in found:
            changes.append(
                _change(
                    f"Cosine similarity, {self.unit}",
                    f"Of {self._of} of both models, on average {self._over()}. 1 is best; at "
                    "0.995 the error is a tenth of the signal.",
                    found["cosine"],
                )
            )
        if "relative_error" in found:
            changes.append(
                _change(
                    f"Relative error, {self.unit}",
                    f"The length of the error over the length of {self._of}, {self._over()}. "
                    "0 is best; 0.1 is an error of a tenth of the signal, or 20 dB.",
                    found["relative_error"],
                )
            )
        return changes


def _relative_error(sums: Totals) -> torch.Tensor:
    error = (sums["error"] / sums["signal"]).sqrt()
    return error.masked_fill(sums["error"] == 0, 0)


def _cosine(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """Return the cosine of each pair; two vectors of zeros point the same way."""
    # In float32, vectors that differ in their last digits have a cosine of 1.
    cosine = F.cosine_similarity(before.double(), after.double(), dim=-1).clamp(-1, 1)
    return cosine.masked_fill_((before == after).all(-1), 1)


def _power(values: torch.Tensor) -> torch.Tensor:
    """Return the squared length of each vector."""
    length: torch.Tensor = torch.linalg.vector_norm(values, dim=-1, dtype=torch.float64)
    return length.square()
