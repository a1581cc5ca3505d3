"""Arguments and options that commands share, with the help that is shown for them."""

from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

__all__ = [
    "DATA",
    "LOADING",
    "QUANTIZATION",
    "SAVING",
    "Accept",
    "Accepted",
    "Debug",
    "Download",
    "Dtype",
    "DtypeOption",
    "GgufFile",
    "Ignore",
    "KvCache",
    "KvCacheOption",
    "Model",
    "NoReport",
    "ObserverFile",
    "ObserverOption",
    "Out",
    "Overwrite",
    "Quiet",
    "RecipeFile",
    "RemoteCode",
    "Scheme",
    "file_option",
]


# Headings in the help.
QUANTIZATION = "What to quantize"
DATA = "Data"
LOADING = "Loading the model"
SAVING = "Writing the result"


class Dtype(str, Enum):
    """What the weights are calibrated in."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class KvCache(str, Enum):
    """What keys and values are stored as."""

    FP8 = "fp8"
    INT8 = "int8"


class Accepted(str, Enum):
    """What is refused unless it is accepted."""

    UNOBSERVED = "unobserved"
    NOT_FINITE = "not_finite"
    UNFUSED = "unfused"


def file_option(name: str, *, help: str, panel: str) -> Any:
    """An option for a file that must be there."""
    return typer.Option(
        name,
        help=help,
        exists=True,
        dir_okay=False,
        show_default=False,
        rich_help_panel=panel,
    )


Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="Folder of a model, or its name on the hub.", show_default=False
    ),
]
Scheme = Annotated[
    str | None,
    typer.Option(
        help="What to quantize: a preset, see [b]inlay schemes[/b].",
        show_default=False,
        rich_help_panel=QUANTIZATION,
    ),
]
RecipeFile = Annotated[
    Path | None,
    file_option(
        "--recipe", help="The same in a YAML file, instead of a scheme.", panel=QUANTIZATION
    ),
]
ObserverOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PART=NAME[:KEY=VALUE,…]",
        help="Observer of weights, input, output or kv-cache, see [b]inlay observers[/b].",
        show_default=False,
        rich_help_panel=QUANTIZATION,
    ),
]
ObserverFile = Annotated[
    Path | None,
    file_option(
        "--observer-file",
        help="Python file to execute; it registers observers.",
        panel=QUANTIZATION,
    ),
]
Ignore = Annotated[
    list[str] | None,
    typer.Option(
        help="Module to leave in full precision: its name or re:PATTERN. The head of a language "
        "model is left out by itself; [b]none[/b] quantizes it too.",
        show_default=False,
        rich_help_panel=QUANTIZATION,
    ),
]
KvCacheOption = Annotated[
    KvCache | None,
    typer.Option(
        help="Quantize keys and values of attention too.",
        show_default=False,
        rich_help_panel=QUANTIZATION,
    ),
]
DtypeOption = Annotated[
    Dtype, typer.Option(help="What to load the weights as.", rich_help_panel=LOADING)
]
Download = Annotated[
    bool,
    typer.Option(
        "--download", help="Fetch from the hub what is not in the cache.", rich_help_panel=LOADING
    ),
]
RemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code", help="Run code that comes with the model.", rich_help_panel=LOADING
    ),
]
GgufFile = Annotated[
    str | None,
    typer.Option(
        help="File in the model's folder to take the weights from.",
        show_default=False,
        rich_help_panel=LOADING,
    ),
]
Out = Annotated[
    Path,
    typer.Option(
        help="Folder to write.", file_okay=False, show_default=False, rich_help_panel=SAVING
    ),
]
Accept = Annotated[
    list[Accepted] | None,
    typer.Option(
        help="Go on where this is found, instead of refusing.",
        show_default=False,
        rich_help_panel=SAVING,
    ),
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace what is in the folder.", rich_help_panel=SAVING)
]
NoReport = Annotated[
    bool, typer.Option("--no-report", help="Write no report.", rich_help_panel=SAVING)
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing unless it fails.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show where an error comes from.")]
