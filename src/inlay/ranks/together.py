"""What all processes of a group do together: if one fails, all fail, and say which and why.

A collective that one process never joins makes the others wait until the group's time is up, and
then fail without a reason. So processes meet in the store of the group first. There each says that
it has arrived, that it failed and why, and, every half second, that it is alive. Whoever waits sees
all of that, so it waits as long as the others are at work, and not much longer.
"""

import atexit
import hashlib
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from inlay.errors import InlayError, RankError
from inlay.ranks.identity import rank, size

__all__ = ["Channel", "EndedError", "channel", "collective", "look_around", "meet", "together"]

_BEAT = 0.5  # seconds between two signs of life
_LOST = 30.0  # seconds without one after which a process counts as lost
_LATE = 1800.0  # seconds to wait for the first one
_LINGER = 10.0  # seconds that a failed process gives the others to hear why
_LOOK_EVERY = 1.0  # seconds between two looks at what the others say, while there is work
_LOOK_WAITING = 0.1  # the same, while there is nothing to do but wait


class EndedError(BaseException):
    """Ends this process because another one failed, wherever it is, as Ctrl-C would.

    What catches all errors, to go on in another way, does not catch this.
    """

    def __init__(self, error: RankError) -> None:
        super().__init__(str(error))
        self.error = error


class Channel:
    """What the processes of a group tell each other, besides their collectives.

    :param store: the group's store
    """

    def __init__(self, store: Any, own: int, count: int) -> None:
        self.store, self.rank, self.size = store, own, count
        self.is_inside = False  # something that all do together
        self.is_failing = False
        self.ended: RankError | None = (
            None  # why this process has to end, if something outside says so
        )
        self.speaks = True  # whether this process is the one to print why all failed
        self._call = 0  # how many things were begun together
        self._step = 0  # how often processes have met in the last one
        self._looked = 0.0
        self._listened = time.monotonic()
        self._heard: dict[int, int] = {}  # how many signs of life
        self._silent: dict[int, float] = {}  # seconds since the last one
        self._others = [other for other in range(count) if other != own]
        self._closed = threading.Event()
        self._alive = threading.Thread(target=self._beat, name="inlay-alive", daemon=True)
        self._alive.start()
        # Python aborts if a daemon thread returns from C++ while the interpreter shuts down.
        atexit.register(self.close)

    def _beat(self) -> None:
        # A connection of its own: the main thread may hold the other one for long.
        with suppress(RuntimeError):
            store = self.store.clone()
            while not self._closed.is_set():
                store.add(f"inlay/alive/{self.rank}", 1)
                self._closed.wait(_BEAT)

    def close(self) -> None:
        """Stop the signs of life, because the group ends."""
        self._closed.set()
        self._alive.join(_LINGER)
        atexit.unregister(self.close)

    def begin(self) -> None:
        self._call, self._step, self.is_inside, self.speaks = self._call + 1, 0, True, True

    def meet(self) -> None:
        """Wait until all processes are here.

        :raises RankError: if one of them failed or ended
        """
        self._step += 1
        key = f"inlay/met/{self._call}/{self._step}"
        begin = time.monotonic()
        with _store_errors():
            arrived = self.store.add(key, 1)
            while arrived < self.size:
                if time.monotonic() - self._looked > _LOOK_WAITING:
                    self.look()
                # Short after a short wait: whoever comes last waits for the others to see it.
                time.sleep(min(max(0.001, (time.monotonic() - begin) / 20), 0.1))
                arrived = self.store.add(key, 0)

    def look(self) -> None:
        """Raise the error of a process that failed.

        :raises RankError: if one failed or ended
        """
        if self.ended is not None:
            raise self.ended
        self._looked = time.monotonic()
        with _store_errors():
            failed = self._failed() if self.store.add(self._failures, 0) else {}
            for other, text in failed.items():
                if other != self.rank:
                    raise RankError(other, f"rank {other} failed: {text}")
            for other, seconds in self.silence().items():
                if seconds > (_LOST if other in self._heard else _LATE):
                    raise _lost(other)

    def look_now_and_then(self) -> None:
        if self.ended is not None or time.monotonic() - self._looked > _LOOK_EVERY:
            self.look()

    def silence(self) -> dict[int, float]:
        """For how many seconds each other process has given no sign of life.

        Seconds in which nobody listened count as few: this process may have been suspended, and the
        others with it.
        """
        now = time.monotonic()
        passed, self._listened = min(now - self._listened, 4 * _BEAT), now
        for other in self._others:
            beats = self.store.add(f"inlay/alive/{other}", 0)
            is_new = beats > self._heard.get(other, 0)
            self._silent[other] = 0.0 if is_new else self._silent.get(other, 0.0) + passed
            if is_new:
                self._heard[other] = beats
        return self._silent

    def fail(self, error: BaseException) -> None:
        """Tell the others of an error, and wait a little until they have heard of it."""
        self.is_failing = True
        if isinstance(error, EndedError):
            error = error.error
        with suppress(RuntimeError):  # there may be no store any more
            if isinstance(error, RankError):
                self.store.add(f"inlay/heard/{self._call}", 1)
                self.speaks = self._is_first_alive(error.rank)
                return
            text = _text(error)
            self.store.set(f"inlay/failed/{self._call}/{self.rank}", text)
            self.store.add(self._failures, 1)
            heard = self._linger()
            failed = self._failed()
            alike = any(failed.get(lower) == text for lower in range(self.rank))
            self.speaks = not heard and not alike

    def _linger(self) -> int:
        """Wait until all others have heard, or failed themselves; return how many have heard."""
        end = time.monotonic() + _LINGER
        while True:
            heard: int = self.store.add(f"inlay/heard/{self._call}", 0)
            ended = self.store.add(self._failures, 0)
            if heard + ended >= self.size or time.monotonic() > end:
                return heard
            time.sleep(0.05)

    def _is_first_alive(self, lost_rank: int) -> bool:
        gone = {lost_rank, *self._failed()}
        return all(lower in gone for lower in range(self.rank))

    @property
    def _failures(self) -> str:
        return f"inlay/failures/{self._call}"

    def _failed(self) -> dict[int, str]:
        keys = {other: f"inlay/failed/{self._call}/{other}" for other in range(self.size)}
        return {
            other: self.store.get(key).decode()
            for other, key in keys.items()
            if self.store.check([key])
        }

    def is_news(self, text: str) -> bool:
        """Whether no process has said this before."""
        known = hashlib.sha256(text.encode()).hexdigest()
        with suppress(RuntimeError):
            return bool(self.store.add(f"inlay/said/{known}", 1) == 1)
        return True

    def find_lost(self, seconds: float, silence: float) -> RankError | None:
        """Find out which process failed or ended, when something outside says that one did.

        :param seconds: how long to look
        :param silence: seconds without a sign of life that tell
        """
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                self.look()
                with _store_errors():
                    other, longest = max(self.silence().items(), key=lambda pair: pair[1])
            except RankError as error:
                return error
            if longest > silence:
                return _lost(other)
            time.sleep(0.1)
        return None


@contextmanager
def _store_errors() -> Iterator[None]:
    """Explain the errors of a store."""
    try:
        yield
    except RankError:
        raise
    except RuntimeError as error:
        gist = next(iter(str(error).splitlines()), "")
        raise RankError(0, f"the process that keeps the group's store is gone: {gist}") from error


def _lost(other: int) -> RankError:
    return RankError(
        other,
        f"rank {other} ended without an error of its own: it was killed, perhaps because memory "
        "ran out, or it crashed",
    )


def _text(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt) or getattr(error, "exit_code", None) == 130:
        return "interrupted"
    if isinstance(error, InlayError):
        return str(error)
    gist = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {gist}"


_channels: dict[int, Channel] = {}  # one at most: torch has one default group at a time


def channel() -> Channel | None:
    """The channel of the default process group; None without a group of several processes."""
    if size() < 2:
        return None
    from inlay.torch_private import default_store

    store = default_store()
    known = _channels.get(id(store))
    if known is None or known.store is not store:
        for other in _channels.values():
            other.close()
        _channels.clear()
        known = _channels[id(store)] = Channel(store, rank(), size())
    return known


@contextmanager
def together() -> Iterator[None]:
    """Do something that all processes of the group do, and end it together.

    If this process fails, the others raise a `RankError` that says so, and if another one fails,
    this one does. Without a group of several processes, and inside another `together`, it changes
    nothing.
    """
    own = channel()
    if own is None or own.is_inside:
        yield
        return
    own.begin()
    try:
        yield
        own.meet()
    except BaseException as error:
        own.fail(error)
        raise
    finally:
        own.is_inside = False


def meet() -> None:
    """Wait for all processes, in something that they do together."""
    own = channel()
    if own is not None and own.is_inside:
        own.meet()


@contextmanager
def collective() -> Iterator[None]:
    """Wait for all processes before a collective, and say who is missing if it breaks."""
    own = channel()
    if own is None or not own.is_inside:
        yield
        return
    own.meet()
    try:
        yield
    except InlayError:
        raise
    except RuntimeError as error:
        culprit = own.find_lost(_LOST, 4 * _BEAT)
        if culprit is None:
            raise
        raise culprit from error


def look_around() -> None:
    """Raise the error of another process, if there is one. For use between two steps of work."""
    own = channel()
    if own is not None and own.is_inside:
        own.look_now_and_then()
