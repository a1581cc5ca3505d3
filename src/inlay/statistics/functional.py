"""The functional view: an observer that keeps statistics in attributes, as a function.

The view sets statistics as attributes on a shadow of the observer, lets the shadow take in a value,
and reads the attributes back. Whatever else the observer may learn into, a graph would lose, so the
view refuses an observer that does.
"""

import copy
import enum
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import combinations
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from inlay.changes import Held, is_container
from inlay.errors import StatisticsError
from inlay.observers import Observer
from inlay.torch_private import (
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    share_memory,
    written_operands,
)

__all__ = [
    "keeps_only_tensors",
    "require_tensors_of_their_own",
    "run_on_shadow",
    "tensors_of",
    "watching_ops",
]

_OF_TORCH = {"_buffers", "_parameters", "_modules"}
_CONSTANT = (
    bool, int, float, complex, str, bytes, range, slice, type, enum.Enum, ModuleType,
    BuiltinFunctionType, torch.dtype, torch.device, torch.layout, re.Pattern,
)  # fmt: skip


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
    with _kept_outside(type(observer)) as changed_outside:
        take_in(shadow)
        changed = changed_outside()
    after = _fingerprints(shadow)
    changed += [name for name in after if before.get(name) != after[name]]
    if changed:
        raise StatisticsError(
            f"it keeps what it learns in {', '.join(changed)}, which is not a tensor; keep each "
            "statistic as a tensor in an attribute of its own"
        )
    return tensors_of(shadow)


def require_tensors_of_their_own(
    before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]
) -> None:
    """Refuse statistics that a graph could not keep apart from each other, or that go away.

    :raises StatisticsError: it says which
    """
    gone = before.keys() - after.keys()
    if gone:
        raise StatisticsError(f"{', '.join(sorted(gone))} is no tensor any more after a value")
    for (one, tensor), (other, another) in combinations(after.items(), 2):
        if share_memory(tensor, another):
            raise StatisticsError(
                f"{one} and {other} share their memory, so that a change of one would have to "
                "change the other; clone one of them"
            )


@contextmanager
def watching_ops(mode: FakeTensorMode) -> Iterator[None]:
    """Raise StatisticsError for ops on tensors without data that a graph would not repeat as is.

    Numbers that are read from such tensors are symbols, so reading them does not synchronize.
    """
    shapes, watching = mode.shape_env, _Watching()  # type: ignore[no-untyped-call]
    with nullcontext() if shapes is None else shapes.ignore_fresh_unbacked_symbols(), watching:
        yield


class _Watching(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise StatisticsError("it draws random numbers, which a compiled graph draws otherwise")
        written = written_operands(func, args, kwargs or {})
        if any(isinstance(t, torch.Tensor) and not isinstance(t, FakeTensor) for t in written):
            raise StatisticsError("it writes to a tensor that is not an attribute of its own")
        return func(*args, **(kwargs or {}))


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
    try:
        return {
            name: _fingerprint(value, name)
            for name, value in vars(observer).items()
            if not isinstance(value, torch.Tensor) and name not in _OF_TORCH and value is not None
        }
    except RecursionError:
        raise StatisticsError("it keeps objects that refer to each other in a circle") from None


def _fingerprint(value: Any, name: str) -> Any:
    if isinstance(value, torch.Tensor):
        raise StatisticsError(
            f"it keeps tensors in {name}, a container; keep each statistic as a tensor in an "
            "attribute of its own"
        )
    if isinstance(value, Observer):
        return id(value)  # a fused one, which has statistics of its own
    if isinstance(value, _CONSTANT) or value is None:
        return value
    if isinstance(value, Mapping):
        return (
            type(value),
            [(_fingerprint(k, name), _fingerprint(v, name)) for k, v in value.items()],
        )
    if isinstance(value, (list, tuple)) or _is_queue(value):
        return (type(value), [_fingerprint(item, name) for item in value])
    if isinstance(value, (set, frozenset)):
        return (type(value), sorted(repr(_fingerprint(item, name)) for item in value))
    if isinstance(value, (bytearray, memoryview)) or hasattr(value, "tobytes"):
        return (type(value), bytes(value.tobytes() if hasattr(value, "tobytes") else value))
    if isinstance(value, partial):
        return _fingerprint((value.func, value.args, value.keywords), name)
    if isinstance(value, FunctionType) and not value.__closure__:
        return (id(value), _fingerprint(vars(value), name))
    own = _attributes(value)
    if own is None:
        raise StatisticsError(
            f"it keeps a {type(value).__name__} in {name}, of which nobody can tell whether it "
            "changes; keep each statistic as a tensor in an attribute of its own"
        )
    return (type(value), [(key, _fingerprint(part, name)) for key, part in own.items()])


def _attributes(value: Any) -> dict[str, Any] | None:
    """What an object of a class written in Python holds; None for any other."""
    slots: list[str] = []
    for cls in type(value).__mro__:
        own = vars(cls).get("__slots__", ())
        slots += [own] if isinstance(own, str) else own
    if not hasattr(value, "__dict__") and not slots:
        return None
    if isinstance(value, (FunctionType, MethodType)):
        return None  # one with variables of its own
    held = {slot: getattr(value, slot) for slot in slots if hasattr(value, slot)}
    held.pop("__weakref__", None)
    return {**held, **held.pop("__dict__", {}), **getattr(value, "__dict__", {})}


def _is_queue(value: Any) -> bool:
    return hasattr(value, "append") and hasattr(value, "__iter__") and hasattr(value, "__len__")


@contextmanager
def _kept_outside(cls: type[Observer]) -> Iterator[Callable[[], list[str]]]:
    """Put back what a value changes on the class and in its module, and tell what it was.

    While a graph is traced values have no data, and a class would keep them for good.
    """
    classes = [base for base in cls.__mro__ if issubclass(base, Observer) and base is not Observer]
    modules = {base.__module__ for base in classes if not base.__module__.startswith("inlay.")}
    spaces: list[Any] = [*classes]
    spaces += [vars(sys.modules[name]) for name in modules if name in sys.modules]
    held = Held([*(("", space) for space in spaces), *_inside(spaces)])
    try:
        yield held.changed
    finally:
        held.put_back()


def _inside(spaces: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """Yield what can be filled, of classes and modules, and the attributes of functions."""
    for space in spaces:
        named = vars(space) if isinstance(space, type) else space
        for name, value in list(named.items()):
            if is_container(value) and not name.startswith("__"):
                yield name, value
            elif isinstance(value, FunctionType):
                yield name, vars(value)
