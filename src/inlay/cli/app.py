"""The program that all commands register with.

The library takes seconds to import, so each command imports the parts it needs: `inlay --help`
answers at once.
"""

import inspect
import os
import sys
from collections.abc import Callable
from typing import Annotated

import typer

from inlay._version import __version__
from inlay.cli.flags import with_flags
from inlay.cli.terminal import reported

__all__ = ["INSPECT", "QUANTIZE", "RUN", "VERIFY", "app", "command", "main"]

# Headings of the commands in the help, in this order.
QUANTIZE, INSPECT, VERIFY, RUN = _HEADINGS = ("Quantize", "Inspect", "Verify", "Run")

app = typer.Typer(
    name="inlay",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def command(
    heading: str, *, example: str, on_all_ranks: bool = False
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a function as a command, under a heading of the help.

    Its dataclass parameters become options (see `with_flags`), and its errors are printed in a
    line. The help starts with the example; the docstring follows.

    :param example: a complete command that works
    :param on_all_ranks: run the command in every process that torchrun started, not in the first
    """

    def register(function: Callable[..., None]) -> Callable[..., None]:
        about = inspect.getdoc(function) or ""
        run = with_flags(reported(function, on_all_ranks=on_all_ranks))
        app.command(
            rich_help_panel=heading,
            short_help=about.partition("\n\n")[0],
            help=f"Example: [b]{example}[/b]\n\n{about}",
        )(run)
        app.registered_commands.sort(key=lambda info: _HEADINGS.index(str(info.rich_help_panel)))
        return run

    return register


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
    """Quantize models: a model and some text in, a checkpoint that vLLM serves out.

    Exit codes: 0 done, 1 refused or failed, 2 wrong usage, 3 beyond a limit, 130 interrupted.
    """
