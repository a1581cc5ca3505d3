"""Attributes that have other values for a while."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from threading import Lock
from typing import Any

__all__ = [
    "Shared",
    "changed",
]


class Shared:
    """A change that several threads can ask for at once: the first makes it, the last undoes it.

    :param make: returns what makes the change and undoes it
    """

    def __init__(self, make: Callable[[], AbstractContextManager[Any]]) -> None:
        self._make, self._lock, self._users = make, Lock(), 0
        self._made: AbstractContextManager[Any] | None = None

    def __enter__(self) -> None:
        with self._lock:
            if self._made is None:
                made = self._make()
                made.__enter__()
                self._made = made
            self._users += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            if not self._users and self._made is not None:
                made, self._made = self._made, None
                made.__exit__(None, None, None)


@contextmanager
def changed(owner: Any, **attributes: Any) -> Iterator[None]:
    """Give attributes other values for a while; those that the owner lacks are left alone."""
    before = {name: getattr(owner, name) for name in attributes if hasattr(owner, name)}
    try:
        for name in before:
            setattr(owner, name, attributes[name])
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)
