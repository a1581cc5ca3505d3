"""The result of comparing two models. It needs no torch, and JSON keeps all of it."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field

from inlay.errors import ConfigurationError
from inlay.options import CompareOptions
from inlay.report.data import Estimate, Finding
from inlay.report.numbers import number
from inlay.report.plain import from_plain, to_plain

__all__ = ["Choice", "ModelComparison", "Position", "SpecialToken", "failures"]

_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A token that a model may say next, and how probable it is."""

    token: str
    probability: float


@dataclass(frozen=True, kw_only=True)
class Position:
    """A position of the data where two models disagree.

    :param row: number of the row in the data, from 1
    :param token: number of the predicted token in its row, from 1
    :param text: the text before it
    :param expected: the token that the data has there, and how probable A finds it; None behind
        the last token of a row
    :param expected_b: how probable B finds it
    :param top_a: what A finds most probable
    """

    row: int
    token: int
    kl: float
    text: str
    expected: Choice | None
    expected_b: float | None
    top_a: tuple[Choice, ...]
    top_b: tuple[Choice, ...]


@dataclass(frozen=True, kw_only=True)
class SpecialToken:
    """How probable a special token is to two models.

    :param expected: at how many positions the data has it next
    :param expected_a: mean probability of the token there, to A
    :param chosen_a: at how many positions it is the first choice of A
    :param chosen_both: at how many of these it is the first choice of B, too
    :param elsewhere_a: mean probability of the token where the data has another one
    :param is_bound: whether `elsewhere_b` is a lower bound
    """

    token: str
    id: int
    expected: int
    expected_a: float | None
    expected_b: float | None
    chosen_a: int
    chosen_b: int
    chosen_both: int
    elsewhere_a: float | None
    elsewhere_b: float | None
    is_bound: bool = False


@dataclass(frozen=True, kw_only=True)
class ModelComparison:
    """The differences between two models, A and B, on some data.

    :param a: folder or name of A
    :param via: URL of the server that computed the predictions of B
    :param data: description of the data
    :param positions: how many positions were compared
    :param estimates: measures by name. For predictions: `kl` (of B from A), `kl_reverse`,
        `agreement`, and for language models `perplexity_a`, `perplexity_b` and
        `perplexity_ratio`. For vectors: `cosine_…` and `relative_error_…` of `tokens` and
        `sequences`
    :param special_tokens: special tokens that the data has or that a model may say
    :param worst: the positions with the largest KL divergence, the worst first
    :param findings: differences of configs, tokenizers, stored tensors and weights
    """

    a: str
    b: str
    data: str
    rows: int
    positions: int
    via: str | None = None
    estimates: dict[str, Estimate] = field(default_factory=dict)
    special_tokens: tuple[SpecialToken, ...] = ()
    worst: tuple[Position, ...] = ()
    findings: tuple[Finding, ...] = ()

    @property
    def warnings(self) -> tuple[Finding, ...]:
        return tuple(each for each in self.findings if each.severity == "warning")

    def to_json(self) -> str:
        """Return strict JSON: words stand for numbers that JSON lacks."""
        document = {"version": _VERSION, "comparison": to_plain(self)}
        return json.dumps(document, allow_nan=False, indent=2, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> "ModelComparison":
        """Read a comparison that `to_json` wrote."""
        document = json.loads(text)
        if not isinstance(document, dict) or document.get("version") != _VERSION:
            raise ConfigurationError(
                f"this is no comparison of version {_VERSION}; compare the models again"
            )
        return from_plain(cls, document.get("comparison"), "comparison")


# Options with a limit: the measure, whether it is an upper limit, and what the limit is of.
_LIMITS = {
    "max_kl": ("kl", True, "KL divergence"),
    "min_agreement": ("agreement", False, "top-1 agreement"),
    "max_perplexity_ratio": ("perplexity_ratio", True, "perplexity ratio"),
    "min_cosine": ("cosine", False, "cosine similarity"),
}


def failures(found: ModelComparison, options: CompareOptions) -> list[str]:
    """Say which limits a comparison is beyond; empty if it is within all of them.

    :raises ConfigurationError: for a limit of something that was not measured
    """
    said = [text for name in _LIMITS for text in _beyond(found, name, getattr(options, name))]
    if options.strict:
        said += [
            f"{each.about}: {each.text}" if each.about else each.text for each in found.warnings
        ]
    return said


def _beyond(found: ModelComparison, option: str, limit: float | None) -> Iterator[str]:
    if limit is None:
        return
    name, is_upper, words = _LIMITS[option]
    measured = {key: each for key, each in found.estimates.items() if key.startswith(name)}
    measured.pop("kl_reverse", None)
    if not measured:
        raise ConfigurationError(
            f"{option} needs the {words}, which these models do not have; they have "
            f"{', '.join(found.estimates) or 'nothing that can be compared'}"
        )
    for estimate in measured.values():
        within = estimate.value <= limit if is_upper else estimate.value >= limit
        if not within:  # NaN is within no limit
            least = "at least " if estimate.is_bound else ""
            side = "above" if is_upper else "below"
            yield f"the {words} is {least}{number(estimate.value)}, {side} {option}={limit:g}"
