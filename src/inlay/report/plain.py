"""Converting dataclasses to plain values for JSON and back, with checks."""

import math
import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from reprlib import repr as short
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from inlay.errors import ConfigurationError

__all__ = ["from_plain", "to_plain"]

_T = TypeVar("_T")
# JSON lacks these numbers. Only a field that holds a number reads these words as one.
_WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_hints = cache(get_type_hints)  # a report has thousands of slots, all of one type


def to_plain(value: Any) -> Any:
    """Convert to dictionaries, lists, strings and finite numbers, leaving out fields of None."""
    if is_dataclass(value):
        parts = {field.name: getattr(value, field.name) for field in fields(value)}
        return {name: to_plain(part) for name, part in parts.items() if part is not None}
    if isinstance(value, Mapping):
        return {str(key): to_plain(part) for key, part in value.items()}
    if isinstance(value, tuple):
        return [to_plain(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def from_plain(cls: type[_T], value: Any, where: str) -> _T:
    """Rebuild the dataclass that `to_plain` converted.

    :param where: name of the value in errors
    """
    return cast(_T, _read(cls, value, where))


def _read(hint: Any, value: Any, where: str) -> Any:
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):  # all unions here are of one type and None
        return None if value is None else _read(inner[0], value, where)
    if origin is Literal:
        if value not in inner:
            raise _unexpected(" or ".join(map(repr, inner)), value, where)
        return value
    if origin is tuple:
        parts = _checked(list, value, where)
        return tuple(_read(inner[0], part, f"{where}[{i}]") for i, part in enumerate(parts))
    if origin is dict:
        parts = _checked(dict, value, where)
        return {key: _read(inner[1], part, f"{where}.{key}") for key, part in parts.items()}
    if is_dataclass(hint):
        return _read_dataclass(hint, _checked(dict, value, where), where)
    if hint is float:
        return _read_float(value, where)
    return _checked(hint, value, where)


def _read_dataclass(cls: Any, value: dict[str, Any], where: str) -> Any:
    hints = _hints(cls)
    unknown = value.keys() - hints.keys()
    if unknown:
        raise ConfigurationError(f"{where} has no {', '.join(sorted(unknown))}")
    given = {name: _read(hints[name], part, f"{where}.{name}") for name, part in value.items()}
    for field in fields(cls):
        if field.name in given or _has_default(field):
            continue
        # None is never written, so an absent field that may be None is None.
        given[field.name] = _read(hints[field.name], None, f"{where}.{field.name}")
    return cls(**given)


def _has_default(field: Any) -> bool:
    return field.default is not MISSING or field.default_factory is not MISSING


def _read_float(value: Any, where: str) -> float:
    if isinstance(value, str) and value in _WORDS:
        return _WORDS[value]
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    return cast(float, _checked(float, value, where))


def _checked(cls: type, value: Any, where: str) -> Any:
    if type(value) is not cls:  # not isinstance: True is no number
        raise _unexpected(cls.__name__, value, where)
    return value


def _unexpected(expected: str, value: Any, where: str) -> ConfigurationError:
    return ConfigurationError(f"{where} must be {expected}, not {short(value)}")
