"""How commands speak: results to the standard output, everything else to the error output."""

import functools
import inspect
import re
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from inlay.cli.arguments import Debug
from inlay.errors import InlayError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = ["calm_transformers", "console", "reported", "table", "tell"]


def reported(command: Callable[..., None]) -> Callable[..., None]:
    """The command with `--debug`, and with its errors told in a line or two."""

    @functools.wraps(command)
    def run(*args: Any, debug: bool, **kwargs: Any) -> None:
        with warnings.catch_warnings():
            warnings.showwarning = _tell_warning  # type: ignore[assignment]
            try:
                command(*args, **kwargs)
            except KeyboardInterrupt:
                tell("interrupted")
                raise typer.Exit(130) from None
            except (typer.Exit, typer.Abort, typer.BadParameter):
                raise
            except Exception as error:
                _fail(error, debug)

    own = inspect.signature(command)
    added = inspect.Parameter(
        "debug", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Debug
    )
    run.__signature__ = own.replace(parameters=[*own.parameters.values(), added])  # type: ignore[attr-defined]
    run.__annotations__ = {**command.__annotations__, "debug": Debug}
    return run


def _fail(error: Exception, debug: bool) -> NoReturn:
    if debug:
        typer.echo("".join(traceback.format_exception(error)), err=True, nl=False)
    elif isinstance(error, InlayError):
        tell(f"error: {_shortened(_with_options(str(error)))}")
    else:
        # Not one of Inlay's own: the text alone may say little, so the type is named too.
        gist = next(iter(str(error).strip().splitlines()), "")
        tell(f"error: {type(error).__name__}: {gist}\n--debug shows where it comes from")
    raise typer.Exit(1)


def _with_options(text: str) -> str:
    """What to do, as it is done on the command line."""
    return re.sub(r'finalize\(accept=\{"(\w+)"\}\)', r"--accept \1", text)


def _shortened(text: str) -> str:
    """Beginning and end, where a list of modules between them is long."""
    if len(text) <= 600:
        return text
    return f"{text[:300]} … {text[-200:]}\n--debug shows all of it"


def tell(text: str) -> None:
    typer.echo(f"inlay: {text}", err=True)


def _tell_warning(message: Warning | str, *_where: Any) -> None:
    tell(f"warning: {message}")


def calm_transformers(quiet: bool) -> None:
    """Bars only where somebody watches; what it would warn of, loading refuses by itself."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    if quiet or not sys.stderr.isatty():
        logging.disable_progress_bar()


def console() -> "Console":
    from rich.console import Console

    # Names of modules and files are not markup. Without a terminal nothing says how wide to be.
    plain = {"markup": False, "emoji": False, "highlight": False}
    return Console(width=None if sys.stdout.isatty() else 160, **plain)  # type: ignore[arg-type]


def table(*columns: str) -> "Table":
    from rich import box
    from rich.table import Table

    return Table(*columns, box=box.SIMPLE_HEAD)
