"""The functional view: an observer that keeps statistics in attributes, as a function.

The view sets statistics as attributes on a shadow of the observer, lets the shadow take in a value,
and reads the attributes back. Whatever else the observer may learn into, a graph would lose, so the
view refuses an observer that does.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from inlay.errors import StatisticsError
from inlay.observers import Observer

__all__ = ["keeps_only_tensors", "run_on_shadow", "tensors_of"]

_OF_TORCH = {"_buffers", "_parameters", "_modules"}


def tensors_of(observer: Observer) -> dict[str, torch.Tensor]:
    """What the observer keeps in tensors, by name."""
    own = {**vars(observer), **observer._buffers}
    return {name: value for name, value in sorted(own.items()) if isinstance(value, torch.Tensor)}


def run_on_shadow(
    observer: Observer, statistics: Mapping[str, torch.Tensor], take_in: Callable[[Observer], None]
) -> dict[str, torch.Tensor]:
    """Let a shadow with these statistics take in a value, and return its statistics after that.

    :raises StatisticsError: if it learns into anything but tensors in attributes of its own
    """
    shadow = _shadow_of(observer)
    for name, tensor in statistics.items():
        setattr(shadow, name, tensor.clone())
    before = _fingerprints(shadow)
    with _class_containers_kept(type(observer)) as changed_on_class:
        take_in(shadow)
        changed = changed_on_class()
    after = _fingerprints(shadow)
    changed += [name for name in after if before.get(name) != after[name]]
    if changed:
        raise StatisticsError(
            f"it keeps what it learns in {', '.join(changed)}, which is not a tensor; keep each "
            "statistic as a tensor in an attribute of its own"
        )
    return tensors_of(shadow)


def keeps_only_tensors(observer: Observer, fresh: Observer) -> bool:
    """Whether all that an observer learned since it was as fresh as the other is in tensors."""
    if observer._modules or observer._parameters:
        return False
    try:
        learned, nothing = _fingerprints(observer), _fingerprints(fresh)
    except StatisticsError:
        return False
    ignored = {"slot", "_unsynced_observations"}
    return all(nothing.get(name) == learned[name] for name in learned if name not in ignored)


def _shadow_of(observer: Observer) -> Observer:
    """A copy that shares its tensors with the observer and nothing else that can change."""
    if observer._modules or observer._parameters:
        raise StatisticsError("it has modules or parameters of its own, which could learn")
    _fingerprints(observer)  # refuses tensors in containers, which would be copied without data
    memo = {id(tensor): tensor for tensor in tensors_of(observer).values()}
    return copy.deepcopy(observer, memo)


def _fingerprints(observer: Observer) -> dict[str, Any]:
    """What attributes hold besides tensors, in a form that is compared by content."""
    return {
        name: _fingerprint(value, name)
        for name, value in vars(observer).items()
        if not isinstance(value, torch.Tensor) and name not in _OF_TORCH and value is not None
    }


def _fingerprint(value: Any, name: str) -> Any:
    if isinstance(value, torch.Tensor):
        raise StatisticsError(
            f"it keeps tensors in {name}, a container; keep each statistic as a tensor in an "
            "attribute of its own"
        )
    if isinstance(value, Observer):
        return id(value)  # a fused one, which has statistics of its own
    if isinstance(value, Mapping):
        return (
            type(value),
            [(_fingerprint(k, name), _fingerprint(v, name)) for k, v in value.items()],
        )
    if isinstance(value, (list, tuple)) or _is_queue(value):
        return (type(value), [_fingerprint(item, name) for item in value])
    if isinstance(value, (set, frozenset)):
        return (type(value), sorted(repr(_fingerprint(item, name)) for item in value))
    own = getattr(value, "__dict__", None)
    if isinstance(own, dict) and not isinstance(value, type) and not callable(value):
        return (type(value), [(key, _fingerprint(part, name)) for key, part in own.items()])
    return value


def _is_queue(value: Any) -> bool:
    return hasattr(value, "append") and hasattr(value, "__iter__") and hasattr(value, "__len__")


@contextmanager
def _class_containers_kept(cls: type[Observer]) -> Iterator[Callable[[], list[str]]]:
    """Put back what a value changes in lists, dicts and sets of the class, and tell which it were.

    While a graph is traced values have no data, and a class would keep them for good.
    """
    found = {
        name: value
        for base in cls.__mro__
        if issubclass(base, Observer) and base is not Observer
        for name, value in vars(base).items()
        if isinstance(value, (list, dict, set)) and not name.startswith("__")
    }
    contents = {name: copy.copy(value) for name, value in found.items()}

    def changed() -> list[str]:
        return [name for name, value in found.items() if not _same_items(value, contents[name])]

    try:
        yield changed
    finally:
        for name, value in found.items():
            if not _same_items(value, contents[name]):
                value.clear()
                value.extend(contents[name]) if isinstance(value, list) else value.update(
                    contents[name]
                )


def _same_items(one: Any, other: Any) -> bool:
    if len(one) != len(other):
        return False
    if isinstance(one, dict):
        return all(key in other and other[key] is item for key, item in one.items())
    if isinstance(one, set):
        return bool(one == other)
    return all(mine is theirs for mine, theirs in zip(one, other, strict=True))
