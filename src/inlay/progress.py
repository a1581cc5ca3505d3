"""Progress bars, drawn only if somebody watches."""

import sys
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeRemainingColumn,
    track,
)

from inlay.ranks.identity import is_first

__all__ = ["Bar", "watched"]

_T = TypeVar("_T")


def watched(
    items: Iterable[_T], what: str, *, total: int | None = None, show: bool | None = None
) -> Iterator[_T]:
    """Yield the items, with a bar that shows how many are done and how long the rest will take.

    :param what: label of the bar
    :param total: how many items there are, if they are to be made one by one
    :param show: draw the bar; by default if standard error is a terminal
    """
    if total is None:
        items = list(items)
        total = len(items)
    show = _shown(show)
    yield from track(
        items, what, total=total, console=_console(show), disable=not show, transient=True
    )


class Bar:
    """A bar over steps of different size, with the amount done per second.

    :param what: label of the bar
    :param total: how many steps there are, or None if that is unknown
    :param unit: unit of the amounts given to `advance`
    :param show: draw the bar; by default if standard error is a terminal
    """

    def __init__(
        self, what: str, *, total: int | None = None, unit: str = "", show: bool | None = None
    ) -> None:
        self.unit, self.amount = unit, 0
        show = _shown(show)
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
            console=_console(show),
            disable=not show,
            transient=True,
        )
        self._task = self._progress.add_task(what, total=total, rate="tracing")

    def advance(self, amount: int, note: str = "") -> None:
        """Count one more step of the given amount.

        :param note: shown behind the rate
        """
        self.amount += amount
        elapsed = self._progress.tasks[0].elapsed
        rate = f"{self.amount / elapsed:,.0f} {self.unit}/s" if elapsed else ""
        rate = ", ".join(filter(None, (rate, note)))
        self._progress.update(self._task, advance=1, rate=rate)

    def __enter__(self) -> "Bar":
        self._progress.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._progress.stop()


def _shown(show: bool | None) -> bool:
    # Of several processes, the first draws.
    return is_first() and (sys.stderr.isatty() if show is None else show)


def _console(show: bool) -> Console:
    return Console(stderr=True, force_terminal=show)
