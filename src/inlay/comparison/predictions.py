"""Predictions of a model for positions of a row: all logits, or the most probable tokens."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from inlay.evaluation.measures import NO_LABEL, Compared, chunks

__all__ = ["Logits", "Prediction", "TopTokens"]

# Servers compute in float32 or bfloat16 and send rounded numbers, so the sum of all probabilities
# is 1 only to about this.
_ROUNDING = 1e-5


class Prediction(ABC):
    """Probabilities of the next token at the positions of a row."""

    @abstractmethod
    def compared_with(self, before: "Logits", labels: torch.Tensor) -> Compared:
        """Compare the prediction of another model with this one.

        :param labels: the next token of each position, or `NO_LABEL`
        """

    @abstractmethod
    def of(self, token: int) -> torch.Tensor:
        """Return the probability of a token at each position; 0 where it is unknown."""

    @abstractmethod
    def first(self) -> torch.Tensor:
        """Return the most probable token at each position."""

    @abstractmethod
    def top(self, position: int, count: int) -> list[tuple[int, float]]:
        """Return the most probable tokens at a position, with their probabilities."""


class Logits(Prediction):
    """A prediction that is known completely.

    :param values: logits of shape (positions, tokens)
    """

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values
        parts = [values[part].float().logsumexp(-1) for part in chunks(*values.shape)]
        self._totals = torch.cat(parts) if parts else values.new_zeros(0)

    def compared_with(self, before: "Logits", labels: torch.Tensor) -> Compared:
        return Compared.of(before.values, self.values, labels)

    def of(self, token: int) -> torch.Tensor:
        return (self.values[:, token].float() - self._totals).exp()

    def first(self) -> torch.Tensor:
        return self.values.argmax(-1)

    def top(self, position: int, count: int) -> list[tuple[int, float]]:
        found = (self.values[position].float() - self._totals[position]).topk(count)
        return list(zip(found.indices.tolist(), found.values.exp().tolist(), strict=True))

    def log_probabilities(self, part: slice) -> torch.Tensor:
        return self.values[part].float() - self._totals[part].unsqueeze(-1)


@dataclass(frozen=True, kw_only=True)
class TopTokens(Prediction):
    """A prediction with the probabilities of some tokens only, as servers give it.

    All other tokens count as one event: divergences are lower bounds (data processing inequality).
    First choices and the probabilities of the next tokens of the data are exact.

    :param tokens: known tokens of each position; shape (positions, known)
    :param log_probabilities: theirs; -Inf for places that are not used
    :param choices: the most probable token of each position
    """

    tokens: torch.Tensor
    log_probabilities: torch.Tensor
    choices: torch.Tensor

    def compared_with(self, before: Logits, labels: torch.Tensor) -> Compared:
        return Compared.joined(
            [
                self._compared(before.log_probabilities(part), part, labels[part])
                for part in chunks(*before.values.shape)
            ]
        )

    def _compared(self, before: torch.Tensor, part: slice, labels: torch.Tensor) -> Compared:
        tokens, after = self.tokens[part], self.log_probabilities[part].double()
        used = after > -torch.inf
        ours = before.gather(-1, tokens).double().masked_fill(~used, -torch.inf)
        complete = used.sum(-1) >= before.size(-1)
        pairs = [_with_rest(each, complete) for each in (ours, after)]
        known = labels != NO_LABEL
        right = labels.masked_fill(~known, 0).unsqueeze(-1)
        found = (tokens == right) & used
        of_label = after.masked_fill(~found, -torch.inf).amax(-1)
        first = before.argmax(-1)
        return Compared(
            before=~before.sum(-1).isnan(),
            after=~after.isnan().any(-1),
            same=first == self.choices[part],
            divergence=_divergence(*pairs),
            reverse=_divergence(*reversed(pairs)),
            labels=known,
            surprise_before=-before.gather(-1, right).squeeze(-1).masked_fill(~known, 0).double(),
            surprise_after=-of_label.masked_fill(~known, 0),
        )

    def of(self, token: int) -> torch.Tensor:
        found = self.log_probabilities.masked_fill(self.tokens != token, -torch.inf)
        return found.amax(-1).exp().float()

    def first(self) -> torch.Tensor:
        return self.choices

    def top(self, position: int, count: int) -> list[tuple[int, float]]:
        values, places = self.log_probabilities[position].sort(descending=True, stable=True)
        tokens = self.tokens[position][places].tolist()
        pairs = zip(tokens, values.exp().tolist(), strict=True)
        return [pair for pair in pairs if pair[1] > 0][:count]


def _with_rest(log_probabilities: torch.Tensor, complete: torch.Tensor) -> torch.Tensor:
    """Return probabilities with one more: that of all other tokens together."""
    probabilities = log_probabilities.exp()
    # A rest smaller than the rounding may be nothing but rounding; a divergence from 0 is infinite.
    rest = (1 - probabilities.sum(-1)).clamp(min=_ROUNDING).masked_fill(complete, 0)
    return torch.cat([probabilities, rest.unsqueeze(-1)], dim=-1)


def _divergence(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    moved = before * (before.log() - after.log())
    return moved.masked_fill(before == 0, 0).sum(-1).clamp(min=0)
