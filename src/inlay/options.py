"""The options of loading and running, with their defaults and their help.

Python and the command line share them: each field is a keyword of a function, and an option of a
command. Importing this takes no time.
"""

from collections.abc import Collection
from dataclasses import dataclass, field, fields
from math import inf
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from inlay.errors import ConfigurationError

if TYPE_CHECKING:
    import torch

__all__ = [
    "ACCEPTABLE",
    "DATA",
    "DTYPES",
    "LIMITS",
    "MODEL",
    "OUTPUT",
    "PANELS",
    "RECIPE",
    "RUN",
    "CompareKeywords",
    "CompareOptions",
    "DataKeywords",
    "DataOptions",
    "LoadKeywords",
    "LoadOptions",
    "Options",
    "RowKeywords",
    "RowOptions",
    "RunKeywords",
    "SearchKeywords",
    "SearchOptions",
    "StreamKeywords",
    "StreamOptions",
    "WriteKeywords",
    "WriteOptions",
    "keywords_of",
]

DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")

# Problems that are refused unless the user accepts them, and what happens then.
ACCEPTABLE = {
    "unobserved": "slots that saw no data stay in full precision",
    "not_finite": "slots with NaN or Inf in their statistics stay in full precision",
    "few_tokens": "experts that saw few tokens are quantized by these",
    "unfused": "layers that are served as one keep global scales of their own",
    "other_weights": "stored statistics of a model with other weights are used",
    "mistraced": "the traced model is calibrated although it differs from the eager one",
}

# Headings of options in the help of the command line, in this order.
MODEL, RECIPE, DATA, RUN, LIMITS, OUTPUT = PANELS = (
    "Model",
    "Recipe",
    "Data",
    "Run",
    "Limits",
    "Output",
)


def _option(
    default: Any,
    help: str,
    panel: str | None,
    *,
    least: int | None = None,
    choices: Collection[str] = (),
) -> Any:
    """Return a field.

    :param panel: heading in the help of the command line; None if it has no such option
    :param least: the smallest value of a number
    """
    shown = {"help": help, "panel": panel, "least": least, "choices": tuple(choices)}
    return field(default=default, metadata=shown)


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """How a model is loaded."""

    dtype: "str | torch.dtype" = _option(  # noqa: RUF009
        "auto", "Dtype to load the weights in; auto is the stored one.", MODEL, choices=DTYPES
    )
    trust_remote_code: bool = _option(False, "Run code that comes with the model.", MODEL)
    gguf_file: str | None = _option(
        None, "GGUF file in the model's folder to take the weights from.", MODEL
    )
    download: bool = _option(False, "Fetch missing files from the hub.", MODEL)


class LoadKeywords(TypedDict, total=False):
    """The fields of `LoadOptions` as keywords."""

    dtype: "str | torch.dtype"
    trust_remote_code: bool
    gguf_file: str | None
    download: bool


@dataclass(frozen=True, kw_only=True)
class RowOptions:
    """Which part of the data is read, and how its rows are divided into batches."""

    split: str | None = _option(
        None,
        "Split of a saved dataset, or the start of the names of files in a folder of data.",
        DATA,
    )
    text_column: str = _option("text", "Column or key of the texts in the data.", DATA)
    max_length: int = _option(2048, "Cut texts after this many tokens.", DATA, least=1)
    batch_size: int = _option(1, "Rows per batch.", DATA, least=1)


class RowKeywords(TypedDict, total=False):
    """The fields of `RowOptions` as keywords."""

    split: str | None
    text_column: str
    max_length: int
    batch_size: int


@dataclass(frozen=True, kw_only=True)
class DataOptions(RowOptions):
    """Which data is read, and how it is divided into batches."""

    seed: int | None = _option(
        None, "Shuffle the rows by this seed; by default they keep their order.", DATA, least=0
    )
    samples: int | None = _option(
        512, "Calibrate on this many rows of the data; None (all) takes all rows.", DATA, least=1
    )
    held_out: int = _option(
        16,
        "Compare the model before and after on this many further rows; 0 for no comparison.",
        DATA,
        least=0,
    )


class DataKeywords(RowKeywords, total=False):
    """The fields of `DataOptions` as keywords."""

    seed: int | None
    samples: int | None
    held_out: int


@dataclass(frozen=True, kw_only=True)
class Options(DataOptions):
    """How a calibration runs."""

    count_padding: bool = _option(False, "Observe padding tokens like any other token.", DATA)
    resume: bool = _option(False, "Continue where an interrupted run stopped.", RUN)
    compiler: str = _option(
        "auto",
        "Backend of torch.compile, or auto: eager, or compiled if the data is estimated to repay "
        "that.",
        RUN,
    )
    accept: Collection[str] = _option(
        (), "Accept this problem instead of refusing to go on.", RUN, choices=ACCEPTABLE
    )
    progress: bool | None = _option(
        None, "Draw progress bars; None draws them if there is a terminal.", None
    )


class RunKeywords(DataKeywords, total=False):
    """The fields of `Options` as keywords."""

    count_padding: bool
    resume: bool
    compiler: str
    accept: Collection[str]
    progress: bool | None


@dataclass(frozen=True, kw_only=True)
class WriteOptions:
    """How a checkpoint is written."""

    overwrite: bool = _option(False, "Replace a folder that is not empty.", OUTPUT)
    max_shard_size: int | str = _option("5GB", "Largest size of a file with weights.", OUTPUT)
    report: bool = _option(True, "Write a report beside the checkpoint.", OUTPUT)


class WriteKeywords(TypedDict, total=False):
    """The fields of `WriteOptions` as keywords."""

    overwrite: bool
    max_shard_size: int | str
    report: bool


@dataclass(frozen=True, kw_only=True)
class StreamOptions(Options, WriteOptions):
    """How a model is calibrated from disk to disk."""

    offload_activations: bool = _option(
        False, "Keep the activations between blocks on disk only.", RUN
    )


class StreamKeywords(RunKeywords, WriteKeywords, total=False):
    """The fields of `StreamOptions` as keywords."""

    offload_activations: bool


@dataclass(frozen=True, kw_only=True)
class CompareOptions(LoadOptions, RowOptions):
    """How two models are compared, and how far they may be apart."""

    samples: int | None = _option(
        64, "Compare on this many rows of the data; None (all) takes all rows.", DATA, least=1
    )
    worst: int = _option(
        5, "Show this many of the positions with the largest KL divergence.", OUTPUT, least=0
    )
    max_kl: float | None = _option(
        None, "Largest KL divergence of B from A, in nats per position.", LIMITS
    )
    min_agreement: float | None = _option(
        None, "Smallest share of positions where both choose the same token.", LIMITS
    )
    max_perplexity_ratio: float | None = _option(
        None, "Largest perplexity of B over that of A.", LIMITS
    )
    min_cosine: float | None = _option(
        None, "Smallest cosine similarity of the outputs of encoders.", LIMITS
    )
    strict: bool = _option(
        False, "Count every warning, such as of a changed chat template, as a failure.", LIMITS
    )
    top_logprobs: int = _option(
        20, "Log-probabilities to ask a server for at each position.", MODEL, least=1
    )
    served_name: str | None = _option(
        None, "Name of the model on the server; by default the one that matches B.", MODEL
    )
    progress: bool | None = _option(
        None, "Draw progress bars; None draws them if there is a terminal.", None
    )

    def __post_init__(self) -> None:
        """Refuse limits that nothing, or everything, is within."""
        largest = {"max_kl": inf, "max_perplexity_ratio": inf, "min_agreement": 1, "min_cosine": 1}
        for name, most in largest.items():
            limit = getattr(self, name)
            if limit is not None and not 0 <= limit <= most:
                upper = "" if most == inf else f" to {most}"
                raise ConfigurationError(f"{name} must be a number from 0{upper}, not {limit}")


class CompareKeywords(LoadKeywords, RowKeywords, total=False):
    """The fields of `CompareOptions` as keywords."""

    samples: int | None
    worst: int
    max_kl: float | None
    min_agreement: float | None
    max_perplexity_ratio: float | None
    min_cosine: float | None
    strict: bool
    top_logprobs: int
    served_name: str | None
    progress: bool | None


@dataclass(frozen=True, kw_only=True)
class SearchOptions(Options):
    """The target of a search, and the formats that it chooses among."""

    bits: float | None = _option(
        None, "Reach this mean number of bits of a weight, without scales.", LIMITS
    )
    size: int | str | None = _option(
        None, "Reach this size of the checkpoint, such as 2.1GB.", LIMITS
    )
    max_kl: float | None = _option(
        None,
        "Find the smallest checkpoint within this KL divergence from the model on held-out rows, "
        "in nats per position.",
        LIMITS,
    )
    formats: str = _option(
        "W4A16:group_size=64,W8A16,bf16",
        "Formats to choose among: presets, with changes of their weights as NAME:KEY=VALUE, and "
        "bf16 for layers that stay as they are.",
        RECIPE,
    )
    method: Literal["best", "plain"] = _option(
        "best",
        "How formats without an observer quantize, as for calibrate.",
        RECIPE,
        choices=("best", "plain"),
    )
    forward_only: bool = _option(
        False,
        "Score layers by their relative error, without gradients. It needs less time and memory, "
        "and chooses worse.",
        RECIPE,
    )

    def __post_init__(self) -> None:
        """Refuse a search without a target, or with several."""
        given = [name for name in ("bits", "size", "max_kl") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ConfigurationError(
                "a search has one target: bits (--bits 4.5), size (--size 2.1GB) or max_kl "
                f"(--max-kl 0.05), not {' and '.join(given) or 'none'}"
            )
        if self.resume:
            raise ConfigurationError("a search cannot resume; leave resume out")


class SearchKeywords(RunKeywords, total=False):
    """The fields of `SearchOptions` as keywords."""

    bits: float | None
    size: int | str | None
    max_kl: float | None
    formats: str
    method: Literal["best", "plain"]
    forward_only: bool


def keywords_of(options: Any, group: type) -> dict[str, Any]:
    """Return the options that a group has, as the keywords of a function."""
    return {each.name: getattr(options, each.name) for each in fields(group)}
