"""Snapshots of objects, to find and undo later changes."""

from collections import deque
from collections.abc import Iterable
from typing import Any

__all__ = ["Held", "is_container"]

_CONTAINERS = (list, dict, set, deque)


def is_container(value: object) -> bool:
    """Whether a value can be held: a list, a dict, a set or a queue."""
    return isinstance(value, _CONTAINERS)


class Held:
    """The contents of containers and of classes, each item by identity.

    :param places: objects to watch, by name
    """

    def __init__(self, places: Iterable[tuple[str, Any]]) -> None:
        self._places = [(name, place, _contents(place)) for name, place in places]

    def changed(self) -> list[str]:
        """Names of the places that hold something else now, and of what in them does."""
        return [
            ".".join(filter(None, (name, str(key))))
            for name, place, before in self._places
            for key in _difference(before, _contents(place))
        ]

    def put_back(self) -> None:
        """Restore all places."""
        for _, place, before in self._places:
            differing = _difference(before, _contents(place))
            if not differing:
                continue
            if not isinstance(before, dict):
                place.clear()
                place.update(before) if isinstance(place, set) else place.extend(before)
                continue
            for key in differing:
                if key in before:
                    _set(place, key, before[key])
                else:
                    _delete(place, key)


def _contents(place: Any) -> dict[Any, Any] | list[Any]:
    if isinstance(place, type):
        return dict(vars(place))
    if isinstance(place, dict):
        # Not by asking it: the activations of transformers make a module of what they hold.
        return dict(dict.items(place))
    return list(place)


def _difference(before: Any, now: Any) -> list[Any]:
    """The keys of what differs, but for names that Python, Dynamo and Inlay have made up.

    Of a list that differs, an empty word.
    """
    if isinstance(before, dict):
        keys = [key for key in before if now.get(key, _GONE) is not before[key]]
        keys += [key for key in now if key not in before]
        return [key for key in keys if not str(key).startswith(("__", "_inlay_"))]
    same = len(before) == len(now) and all(a is b for a, b in zip(before, now, strict=True))
    return [] if same else [""]


def _set(place: Any, key: Any, value: Any) -> None:
    if isinstance(place, type):
        setattr(place, key, value)
    else:
        place[key] = value


def _delete(place: Any, key: Any) -> None:
    if isinstance(place, type):
        delattr(place, key)
    else:
        del place[key]


_GONE = object()
