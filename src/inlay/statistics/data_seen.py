"""How far a run got through its data, and which batches these were."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["DataSeen"]


@dataclass(frozen=True, kw_only=True)
class DataSeen:
    """How far a run got through its data.

    Only a run that keeps its statistics in a folder takes fingerprints of its batches, because only
    such a run can be resumed. Statistics that were saved once, beside a checkpoint, and those of
    several runs together have none. They can be merged and quantized anew, and resuming refuses
    them.

    :param fingerprints: of the batches, by their numbers among the batches of all ranks: to know
        the same data again, and which of it is left, on however many ranks it goes on
    """

    batches: int = 0
    samples: int = 0
    tokens: int = 0
    padding_tokens: int = 0
    fingerprints: Mapping[int, str] = field(default_factory=dict, repr=False)

    def after(self, *, samples: int, tokens: int, padding: int) -> "DataSeen":
        """Add a batch."""
        return DataSeen(
            batches=self.batches + 1,
            samples=self.samples + samples,
            tokens=self.tokens + tokens,
            padding_tokens=self.padding_tokens + padding,
            fingerprints=self.fingerprints,
        )

    @property
    def is_unknown(self) -> bool:
        """Whether nobody can tell if other data is this data."""
        return len(self.fingerprints) != self.batches

    @staticmethod
    def of_all(parts: Iterable["DataSeen"]) -> "DataSeen":
        """What several ranks, or runs, have seen together.

        If two have seen a batch of the same number, fingerprints no longer tell what was seen.
        """
        parts = list(parts)
        return DataSeen(
            batches=sum(part.batches for part in parts),
            samples=sum(part.samples for part in parts),
            tokens=sum(part.tokens for part in parts),
            padding_tokens=sum(part.padding_tokens for part in parts),
            fingerprints={n: text for part in parts for n, text in part.fingerprints.items()},
        )

    def to_plain(self) -> dict[str, Any]:
        """The same as values that JSON keeps, with runs of numbers as start, end and step."""
        numbers = sorted(self.fingerprints)
        return {
            "batches": self.batches,
            "samples": self.samples,
            "tokens": self.tokens,
            "padding_tokens": self.padding_tokens,
            "numbers": [[run.start, run.stop, run.step] for run in _runs(numbers)],
            "fingerprints": " ".join(self.fingerprints[number] for number in numbers),
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> "DataSeen":
        """Read what `to_plain` gave. An older form had one fingerprint of all batches: no use."""
        numbers = [number for run in plain.get("numbers", ()) for number in range(*run)]
        texts = plain.get("fingerprints", "").split()
        counts = ("batches", "samples", "tokens", "padding_tokens")
        return cls(
            **{name: plain[name] for name in counts},
            fingerprints=dict(zip(numbers, texts, strict=True)),
        )


def _runs(numbers: list[int]) -> Iterator[range]:
    """The same numbers as ranges, as few as can be had by looking ahead by one."""
    start = 0
    while start < len(numbers):
        end = start + 1
        step = numbers[end] - numbers[start] if end < len(numbers) else 1
        while end < len(numbers) and numbers[end] - numbers[end - 1] == step:
            end += 1
        yield range(numbers[start], numbers[end - 1] + 1, step)
        start = end
