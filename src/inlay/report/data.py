"""What a report says. It knows nothing of torch, and comes back from JSON as it was."""

import json
from dataclasses import dataclass, field
from typing import Literal

from inlay.errors import ConfigurationError
from inlay.report.plain import from_plain, to_plain

__all__ = [
    "Change",
    "Distribution",
    "Finding",
    "LayerError",
    "ReportData",
    "SlotRecord",
    "Stage",
]

_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A part of the work and how long it took."""

    name: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Change:
    """One measure of how the output changed, on data held out from calibration.

    :param before: of the model as it was, where the measure has such a value
    :param after: of the quantized model
    :param value: of the two together, such as their agreement
    :param explanation: what the measure says, and which way is better
    """

    name: str
    explanation: str
    before: float | None = None
    after: float | None = None
    value: float | None = None


@dataclass(frozen=True, kw_only=True)
class LayerError:
    """The signal of a module over its quantization error, in decibels.

    :param sqnr_db: of the module's output
    """

    module: str
    sqnr_db: float | None
    weight_sqnr_db: float | None = None
    input_sqnr_db: float | None = None


@dataclass(frozen=True, kw_only=True)
class Distribution:
    """Counts of values between edges that need not be evenly spaced.

    A bin may have no width: its values are all exactly that number.

    :param edges: in ascending order, one more than there are counts
    :param clip_low: the smallest value that the quantized model can represent
    """

    edges: tuple[float, ...]
    counts: tuple[float, ...]
    clip_low: float | None = None
    clip_high: float | None = None

    def __post_init__(self) -> None:
        if len(self.edges) != len(self.counts) + 1:
            raise ConfigurationError(
                f"a distribution of {len(self.counts)} counts needs {len(self.counts) + 1} edges, "
                f"not {len(self.edges)}"
            )


@dataclass(frozen=True, kw_only=True)
class SlotRecord:
    """One place that is quantized, and what was found there.

    :param kind: what of the module it is
    :param format: in words, such as "int8 per tensor, static"
    :param tokens: how many were seen; None for weights
    :param low: the smallest value observed, over all groups
    :param scale_count: how many scales there are; 0 where they are computed at run time
    """

    name: str
    module: str
    kind: Literal["weight", "input", "output", "q", "k", "v"]
    observer: str
    format: str
    scale_count: int
    tokens: int | None = None
    low: float | None = None
    high: float | None = None
    scale_min: float | None = None
    scale_max: float | None = None
    sqnr_db: float | None = None
    distribution: Distribution | None = None


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something a reader should know.

    :param about: the slot or module it concerns; None for the model as a whole
    """

    severity: Literal["note", "warning"]
    text: str
    about: str | None = None


@dataclass(frozen=True, kw_only=True)
class ReportData:
    """All that a report shows.

    :param recipe: as text, such as its YAML
    :param scheme: in a few words
    :param data: where the text for calibration came from
    :param tokens: how many were seen, without padding
    :param created: date and time in ISO 8601
    :param versions: of the packages that took part
    :param size_before: bytes of the model as it was
    :param layers: in the order of depth
    :param slots: in the order of depth
    """

    title: str
    model: str
    recipe: str
    scheme: str
    data: str
    samples: int
    tokens: int
    padding_tokens: int
    created: str
    size_before: int
    size_after: int
    versions: dict[str, str] = field(default_factory=dict)
    stages: tuple[Stage, ...] = ()
    changes: tuple[Change, ...] = ()
    layers: tuple[LayerError, ...] = ()
    slots: tuple[SlotRecord, ...] = ()
    findings: tuple[Finding, ...] = ()

    def to_json(self) -> str:
        """As JSON by the letter: numbers that JSON lacks are written as words."""
        document = {"version": _VERSION, "report": to_plain(self)}
        return json.dumps(document, allow_nan=False, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> "ReportData":
        """The report that `to_json` wrote."""
        try:
            document = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigurationError(f"the saved report is not JSON: {error}") from error
        version = document.get("version") if isinstance(document, dict) else None
        if version != _VERSION:
            raise ConfigurationError(
                f"the saved report has version {version!r}, this Inlay reads {_VERSION}; "
                "make it again with this version"
            )
        return from_plain(cls, document.get("report"), "report")
