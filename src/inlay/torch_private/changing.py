"""Attributes that have other values for a while."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = [
    "changed",
]


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
