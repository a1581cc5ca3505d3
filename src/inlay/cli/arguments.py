"""Arguments and options that commands share, with their help."""

from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from inlay.options import DATA, OUTPUT, RECIPE, RUN

__all__ = [
    "Debug",
    "ExpertTokens",
    "KeepHessians",
    "KvCache",
    "MethodName",
    "MethodOption",
    "Model",
    "NoComparison",
    "ObserverFile",
    "Out",
    "ProposedOut",
    "Quiet",
    "RecipeOptions",
    "SampleText",
    "Stream",
    "data_option",
    "file_option",
]


class KvCache(str, Enum):
    """Formats that keys and values can be stored in."""

    FP8 = "fp8"
    INT8 = "int8"


class ExpertTokens(str, Enum):
    """Whose tokens the scales of an expert's inputs rest on."""

    ROUTED = "routed"
    FILL = "fill"
    LAYER = "layer"
    ALL = "all"


class MethodName(str, Enum):
    """Methods for the weights of presets."""

    BEST = "best"
    PLAIN = "plain"


def file_option(name: str, *, help: str, panel: str) -> Any:
    """Return an option for a file that must exist."""
    return typer.Option(
        name,
        help=help,
        exists=True,
        dir_okay=False,
        show_default=False,
        rich_help_panel=panel,
    )


def data_option(help: str) -> Any:
    """Return the option for data: a file or folder that must exist."""
    return typer.Option("--data", help=help, exists=True, show_default=False, rich_help_panel=DATA)


Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="Folder of a model or its name on the hub.", show_default=False
    ),
]
ObserverFile = Annotated[
    Path | None,
    file_option(
        "--observer-file",
        help="Python file that registers observers; it is executed.",
        panel=RECIPE,
    ),
]
MethodOption = Annotated[
    MethodName,
    typer.Option(
        "--method",
        help="How a scheme quantizes: [b]best[/b] (weights of 4 bits or fewer by GPTQ, or without "
        "data by the range with the smallest error; static integer inputs equalized), or "
        "[b]plain[/b], as llm-compressor does by default. An observer that you name stays.",
        rich_help_panel=RECIPE,
    ),
]
SampleText = Annotated[
    bool,
    typer.Option(
        "--sample-text",
        help="Calibrate on a short text that comes with Inlay, to try things out only.",
        rich_help_panel=DATA,
    ),
]
KeepHessians = Annotated[
    bool,
    typer.Option(
        "--keep-hessians",
        help="Keep what GPTQ gathered with the statistics, for [b]inlay requantize[/b]. It takes "
        "as much space as the weights, or more.",
        rich_help_panel=OUTPUT,
    ),
]
Out = Annotated[
    Path,
    typer.Option(
        help="Folder to write.", file_okay=False, show_default=False, rich_help_panel=OUTPUT
    ),
]
ProposedOut = Annotated[
    Path | None,
    typer.Option(
        "--out",
        help="Folder to write.",
        file_okay=False,
        show_default="MODEL-SCHEME",
        rich_help_panel=OUTPUT,
    ),
]
NoComparison = Annotated[
    bool,
    typer.Option(
        "--no-comparison",
        help="Hold no data out, and do not compare the model before and after.",
        rich_help_panel=OUTPUT,
    ),
]
Stream = Annotated[
    bool | None,
    typer.Option(
        "--stream/--no-stream",
        help="Read, run, quantize and write the model block by block, with one in memory. By "
        "default only if GPTQ needs much memory.",
        rich_help_panel=RUN,
    ),
]
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="Print nothing but errors.", rich_help_panel=RUN)
]
Debug = Annotated[
    bool, typer.Option("--debug", help="Show the traceback of an error.", rich_help_panel=RUN)
]


@dataclass(frozen=True, kw_only=True)
class RecipeOptions:
    """What to quantize and how, as it is typed."""

    scheme: Annotated[
        str | None,
        typer.Option(
            help="Preset that says what to quantize, see [b]inlay schemes[/b].",
            show_default=False,
            rich_help_panel=RECIPE,
        ),
    ] = None
    recipe: Annotated[
        Path | None,
        file_option("--recipe", help="YAML file that says what to quantize.", panel=RECIPE),
    ] = None
    observer: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PART=NAME[:KEY=VALUE,…]",
            help="Observer for weights, input, output or kv-cache, see [b]inlay observers[/b].",
            show_default=False,
            rich_help_panel=RECIPE,
        ),
    ] = None
    observer_file: ObserverFile = None
    group_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Columns of a weight that share a scale, in place of what the scheme or the "
            "recipe says.",
            show_default=False,
            rich_help_panel=RECIPE,
        ),
    ] = None
    ignore: Annotated[
        list[str] | None,
        typer.Option(
            help="Module to leave in full precision: its name or re:PATTERN. The head of a "
            "language model or classifier always is, unless this is [b]none[/b].",
            show_default=False,
            rich_help_panel=RECIPE,
        ),
    ] = None
    kv_cache: Annotated[
        KvCache | None,
        typer.Option(
            help="Also quantize keys and values of attention.",
            show_default=False,
            rich_help_panel=RECIPE,
        ),
    ] = None
    equalize: Annotated[
        str | None,
        typer.Option(
            metavar="STRENGTH",
            help="Move the size of outlier channels from inputs into weights: a number from 0 to "
            "1, or [b]auto[/b].",
            show_default=False,
            rich_help_panel=RECIPE,
        ),
    ] = None
    experts: Annotated[
        ExpertTokens | None,
        typer.Option(
            help="Whose tokens the scales of an expert's inputs rest on: those that are "
            "[b]routed[/b] to it; the same, but those of its layer where these are few "
            "([b]fill[/b]); always those of its [b]layer[/b]; or [b]all[/b], sent through every "
            "expert.",
            show_default="routed",
            rich_help_panel=RECIPE,
        ),
    ] = None
    gptq: Annotated[
        bool,
        typer.Option(
            "--gptq",
            help="Round weights by GPTQ, which lets later columns compensate the error of earlier "
            "ones. Needs data.",
            rich_help_panel=RECIPE,
        ),
    ] = False
