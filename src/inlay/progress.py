"""Progress bars, where somebody watches."""

import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import track

__all__ = ["watched"]

_T = TypeVar("_T")


def watched(items: Iterable[_T], what: str, *, show: bool | None = None) -> Iterator[_T]:
    """The items, with a bar that says how many are done and how long the rest will take.

    :param show: whether to draw it; by default where the error output is a terminal
    """
    items = list(items)
    if show is None:
        show = sys.stderr.isatty()
    console = Console(stderr=True, force_terminal=show)
    yield from track(items, what, console=console, disable=not show, transient=True)
