"""Progress bars, where somebody watches."""

import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import track

__all__ = ["watched"]

T = TypeVar("T")


def watched(items: Iterable[T], what: str, *, show: bool | None = None) -> Iterator[T]:
    """The items, with a bar that says how many are done and how long the rest will take.

    :param show: whether to draw it; by default where the error output is a terminal
    """
    items = list(items)
    if show is None:
        show = sys.stderr.isatty()
    console = Console(stderr=True, quiet=not show)
    yield from track(items, what, console=console, disable=not show, transient=True)
