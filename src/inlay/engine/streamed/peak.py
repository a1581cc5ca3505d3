"""The peak of memory that a process takes, as far as it is not backed by files."""

import contextlib
import re
import threading
from pathlib import Path

from inlay.collectives import from_all_ranks

__all__ = ["MemoryWatch", "anonymous_memory"]

_STATUS = Path("/proc/self/status")
_EVERY = 0.02  # seconds


def anonymous_memory() -> int | None:
    """Return the bytes of memory in use that no file backs; None where the system does not say."""
    with contextlib.suppress(OSError):
        found = re.search(r"^RssAnon:\s+(\d+) kB", _STATUS.read_text(), re.MULTILINE)
        if found is not None:
            return int(found[1]) * 1024
    return None


class MemoryWatch:
    """Notes the peak while it is entered."""

    def __init__(self) -> None:
        self._own: int | None = None
        self._of_others: int | None = None
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "MemoryWatch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        self._note()

    @property
    def peak(self) -> int | None:
        """Bytes at their peak, in this process or another that it has heard of."""
        return max((each for each in (self._own, self._of_others) if each), default=None)

    def hear_of_others(self) -> None:
        """Ask all ranks for their peak so far. Every rank calls it."""
        self._of_others = max((each for each in from_all_ranks(self._own) if each), default=None)

    def _watch(self) -> None:
        while not self._done.wait(_EVERY):
            self._note()

    def _note(self) -> None:
        now = anonymous_memory()
        if now is not None:
            self._own = max(now, self._own or 0)
