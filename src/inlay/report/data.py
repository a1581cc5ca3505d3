"""The data of a report. It needs no torch, and JSON keeps all of it."""

import json
from dataclasses import dataclass, field
from typing import Literal

from inlay.errors import ConfigurationError
from inlay.report.plain import from_plain, to_plain

__all__ = [
    "Change",
    "CompensatedWeight",
    "Distribution",
    "EqualizedValue",
    "Estimate",
    "ExpertLayer",
    "Finding",
    "Interval",
    "LayerError",
    "ReportData",
    "SlotRecord",
    "Stage",
    "UnequalizedValue",
]

_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A part of a run and how long it took."""

    name: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Interval:
    """Where a number may lie: 95% of the bootstrap over rows of data."""

    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A number measured on some rows of data.

    :param interval: None for a single row
    :param is_bound: whether the number is a lower bound of what was to be measured
    """

    value: float
    interval: Interval | None = None
    is_bound: bool = False


@dataclass(frozen=True, kw_only=True)
class Change:
    """One measure of how the output changed, on data held out from calibration.

    :param explanation: the meaning of the measure, and which direction is better
    :param before: value of the original model, if the measure has one
    :param after: value of the quantized model, if the measure has one
    :param value: value of both models together, such as their agreement
    """

    name: str
    explanation: str
    before: float | None = None
    after: float | None = None
    value: float | None = None
    before_interval: Interval | None = None
    after_interval: Interval | None = None
    interval: Interval | None = None


@dataclass(frozen=True, kw_only=True)
class LayerError:
    """The ratio of a module's signal to its quantization error, in decibels.

    :param sqnr_db: ratio for the module's output
    """

    module: str
    sqnr_db: float | None
    weight_sqnr_db: float | None = None
    input_sqnr_db: float | None = None


@dataclass(frozen=True, kw_only=True)
class Distribution:
    """Counts of values between edges that need not be evenly spaced.

    A bin may have no width: all its values are exactly that number.

    :param edges: edges in ascending order, one more than counts
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
    """A quantized slot and its statistics.

    :param kind: part of the module
    :param format: format in words, such as "int8 per tensor, static"
    :param scale_count: how many scales there are; 0 if they are computed at run time
    :param tokens: how many tokens were seen; None for weights
    :param low: the smallest value observed, over all groups
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
class EqualizedValue:
    """A value whose channels were scaled before it was quantized.

    :param readers: modules that read it
    :param parameters: parameters that were scaled for it, besides the weights of the readers
    :param before: how many times larger its largest channel was than the median one
    :param after: the same for the scaled channels
    """

    readers: tuple[str, ...]
    parameters: tuple[str, ...]
    strength: float
    before: float
    after: float


@dataclass(frozen=True, kw_only=True)
class UnequalizedValue:
    """A module whose input could not be equalized, and why."""

    module: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class CompensatedWeight:
    """A weight whose rounding errors GPTQ compensated.

    Ratios are of the layer's output on the calibration data to the error of its weight alone.

    :param before_db: the ratio with the weight rounded to nearest, in decibels
    :param after_db: the ratio with the weight compensated
    :param damping: the damping that its Hessian needed
    :param failed: whether the Hessian could not be factorized, so the weight is rounded to nearest
    """

    module: str
    before_db: float
    after_db: float
    damping: float
    failed: bool = False


@dataclass(frozen=True, kw_only=True)
class ExpertLayer:
    """What is known of each expert of a layer.

    :param tokens: how many tokens each has seen; none if inputs of experts were not observed
    :param starved: the numbers of experts that saw none, or few
    :param sqnr_db: the ratio of signal to error for the output of each expert's worst projection,
        in decibels; None for an expert that no held-out token reached
    """

    module: str
    tokens: tuple[int, ...] = ()
    starved: tuple[int, ...] = ()
    sqnr_db: tuple[float | None, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A fact that a reader should know.

    :param about: the slot or module concerned; None for the model as a whole
    """

    severity: Literal["note", "warning"]
    text: str
    about: str | None = None


@dataclass(frozen=True, kw_only=True)
class ReportData:
    """The content of a report.

    :param model: name of the model, without its path
    :param recipe: the recipe as text, such as its YAML
    :param scheme: the scheme in a few words
    :param data: description of the calibration data's source
    :param tokens: how many tokens were seen, without padding
    :param created: date and time in ISO 8601
    :param size_before: bytes of the original model
    :param versions: versions of the packages involved
    :param layers: errors of layers, in the order of depth
    :param slots: slots in the order of depth
    :param equalized: values that were equalized, if the recipe asks for that
    :param unequalized: inputs that could not be
    :param compensated: weights that were rounded by GPTQ, if the recipe asks for that
    :param peak_memory: bytes of memory that no file backs, at their peak, if that was measured
    :param tokens_per_second: tokens over the time of the run without comparing, if it was streamed
    :param experts: layers whose experts were observed or compared, in the order of depth
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
    tracing: tuple[str, ...] = ()
    tiers: tuple[str, ...] = ()
    changes: tuple[Change, ...] = ()
    layers: tuple[LayerError, ...] = ()
    slots: tuple[SlotRecord, ...] = ()
    findings: tuple[Finding, ...] = ()
    equalized: tuple[EqualizedValue, ...] = ()
    unequalized: tuple[UnequalizedValue, ...] = ()
    compensated: tuple[CompensatedWeight, ...] = ()
    peak_memory: int | None = None
    tokens_per_second: float | None = None
    experts: tuple[ExpertLayer, ...] = ()

    def to_json(self) -> str:
        """Return strict JSON: words stand for numbers that JSON lacks."""
        document = {"version": _VERSION, "report": to_plain(self)}
        return json.dumps(document, allow_nan=False, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> "ReportData":
        """Read a report that `to_json` wrote."""
        try:
            document = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigurationError(f"the saved report is not JSON: {error}") from error
        version = document.get("version") if isinstance(document, dict) else None
        if version != _VERSION:
            raise ConfigurationError(
                f"the saved report has version {version!r}, but this Inlay reads {_VERSION}; "
                "calibrate again with this version"
            )
        return from_plain(cls, document.get("report"), "report")
