"""Output of commands: results go to standard output, everything else to standard error."""

import contextlib
import functools
import inspect
import logging
import os
import re
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from inlay.cli.arguments import Debug
from inlay.cli.torchrun import process_group, started_by_torchrun
from inlay.errors import InlayError, RankError
from inlay.ranks.identity import is_first, rank
from inlay.ranks.together import EndedError, channel, together

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = [
    "announce_stages",
    "calm_transformers",
    "console",
    "exit_code",
    "reported",
    "table",
    "tell",
]


class _Terminated(KeyboardInterrupt):
    """The process was asked to end. It ends like one that the user interrupts."""


def reported(command: Callable[..., None], *, on_all_ranks: bool = False) -> Callable[..., None]:
    """Add `--debug` to a command, and print its errors and warnings in a line or two.

    :param on_all_ranks: use all processes that torchrun started. If one fails, all end, and one of
        them prints the error. By default the command runs in the first process
    """
    group: Callable[[], AbstractContextManager[None]] = (
        process_group if on_all_ranks else contextlib.nullcontext
    )

    @functools.wraps(command)
    def run(*args: Any, debug: bool, **kwargs: Any) -> None:
        joined = started_by_torchrun()
        if joined and not on_all_ranks and os.environ["RANK"] != "0":
            return
        # Under torchrun, the signal tells that another process has ended.
        with group() if joined else _explaining_sigterm(), warnings.catch_warnings():
            warnings.showwarning = _tell_warning  # type: ignore[assignment]
            try:
                with together():
                    command(*args, **kwargs)
            except KeyboardInterrupt as ending:
                if _speaks():
                    tell("interrupted")
                raise typer.Exit(exit_code(ending)) from None
            except (typer.Exit, typer.Abort, typer.BadParameter) as ending:
                if not _speaks():
                    raise typer.Exit(getattr(ending, "exit_code", 1)) from None
                raise
            except EndedError as ended:
                _fail(ended.error, debug)
            except Exception as error:
                _fail(error, debug)

    own = inspect.signature(command)
    added = inspect.Parameter(
        "debug", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Debug
    )
    run.__signature__ = own.replace(parameters=[*own.parameters.values(), added])  # type: ignore[attr-defined]
    run.__annotations__ = {**command.__annotations__, "debug": Debug}
    return run


def _speaks() -> bool:
    """Whether this process is the one of all that says why they end."""
    own = channel()
    return own is None or own.speaks


def _fail(error: Exception, debug: bool) -> NoReturn:
    if debug and (_speaks() or not isinstance(error, RankError)):
        typer.echo("".join(traceback.format_exception(error)), err=True, nl=False)
    elif not _speaks():
        pass
    elif isinstance(error, InlayError):
        tell(f"error: {_shortened(_with_options(str(error)))}")
    else:
        # The text of a foreign error may say little by itself, so its type is named too.
        gist = next(iter(str(error).strip().splitlines()), "")
        tell(f"error: {type(error).__name__}: {gist}\n--debug shows the traceback")
    raise typer.Exit(1)


def _with_options(text: str) -> str:
    """Turn advice for Python into advice for the command line."""
    return re.sub(r'(?:finalize|calibrate)\(accept=\{"(\w+)"\}\)', r"--accept \1", text)


def _shortened(text: str) -> str:
    """Cut the middle out of a long error, where it lists modules."""
    if len(text) <= 600:
        return text
    return f"{text[:300]} … {text[-200:]}\n--debug shows the whole error"


def tell(text: str) -> None:
    """Print a line to standard error."""
    who = "inlay" if is_first() else f"inlay: rank {rank()}"
    typer.echo(f"{who}: {text}", err=True)


def _tell_warning(message: Warning | str, *_where: Any) -> None:
    own = channel()
    if own is None or own.is_news(str(message)):
        tell(f"warning: {message}")


def exit_code(interruption: BaseException | None) -> int:
    """Return the exit code that shells give to a process which a signal ended."""
    is_terminated = isinstance(interruption, _Terminated)
    return 128 + (signal.SIGTERM if is_terminated else signal.SIGINT)


@contextlib.contextmanager
def _explaining_sigterm() -> Iterator[None]:
    """Let SIGTERM end the command as Ctrl-C does, which says how to resume."""

    def end(_number: int, _frame: Any) -> NoReturn:
        raise _Terminated

    if threading.current_thread() is not threading.main_thread():
        yield  # signals are handled in the main thread only
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _Lines(logging.Handler):
    """Prints a record as a line."""

    def emit(self, record: logging.LogRecord) -> None:
        tell(record.getMessage())


def announce_stages(quiet: bool) -> None:
    """Print a line when a stage of the run begins, in the first process."""
    log = logging.getLogger("inlay")
    for handler in [each for each in log.handlers if isinstance(each, _Lines)]:
        log.removeHandler(handler)
    if not quiet and is_first():
        log.setLevel(logging.INFO)
        log.addHandler(_Lines())
        log.info("importing torch and transformers")


def calm_transformers(quiet: bool) -> None:
    """Silence transformers: Inlay itself refuses bad models, and bars are for terminals only."""
    from transformers import logging

    logging.set_verbosity_error()
    if quiet or not is_first() or not sys.stderr.isatty():
        logging.disable_progress_bar()


def console() -> "Console":
    """Return a console for standard output that prints names of modules and files as they are."""
    from rich.console import Console

    # A terminal has a width; anything else gets a fixed one.
    plain = {"markup": False, "emoji": False, "highlight": False}
    return Console(width=None if sys.stdout.isatty() else 160, **plain)  # type: ignore[arg-type]


def table(*columns: str) -> "Table":
    """Return an empty table with these headings."""
    from rich import box
    from rich.table import Table

    return Table(*columns, box=box.SIMPLE_HEAD)
