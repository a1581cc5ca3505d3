"""The program that all commands register with.

The library takes seconds to import, so each command imports the parts it needs: `inlay --help`
answers at once.
"""

import os
import sys
from typing import Annotated

import typer

from inlay._version import __version__

__all__ = ["app", "main"]

app = typer.Typer(
    name="inlay",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Run the command line."""
    if not sys.stderr.isatty():
        # Libraries draw progress bars of their own; they read this once, on import.
        os.environ.setdefault("TQDM_DISABLE", "1")
    app(prog_name="inlay")


def _show_version(value: bool) -> None:
    if value:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Show the version and exit.", callback=_show_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Calibrate models for quantization: a model and some text in, a checkpoint out.

    Exit codes: 0 done, 1 refused or failed, 2 wrong usage, 130 interrupted.
    """
