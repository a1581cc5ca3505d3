"""Private parts of torch: copies of module trees that share parameters and buffers."""

import operator
import weakref
from collections import OrderedDict
from collections.abc import Mapping
from functools import partial
from types import MethodType
from typing import Any

from torch import nn
from torch.jit import ScriptModule

__all__ = ["SharedCopy"]

# Dicts that each counterpart has for itself: hooks are registered and removed in them.
_OWN = (
    "_modules",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)
_DEPTH = 4  # of nested containers that are searched for modules


class SharedCopy:
    """A copy of a module tree that shares all parameters and buffers with the original.

    Each module has one counterpart: an object of the same class with its own attributes, submodules
    and hooks. Setting an attribute of a counterpart leaves the original alone. The dicts of
    parameters and buffers are shared, so a parameter that is replaced later is replaced in both.
    Counterparts are in evaluation mode, whatever the mode of the originals is.

    torch 2.0; `copy.copy` of a module shares its submodules, and `copy.deepcopy` copies parameters.
    """

    def __init__(self, root: nn.Module) -> None:
        self._pairs: dict[int, tuple[nn.Module, nn.Module]] = {}
        self._copied: dict[int, dict[str, Any]] = {}  # attributes of originals, as last copied
        self._held: dict[int, list[Any]] = {}
        self.root = self._counterpart(root)

    def of(self, module: nn.Module) -> nn.Module:
        """Return the counterpart of a module of the tree."""
        return self._pairs[id(module)][1]

    def refresh(self) -> None:
        """Copy attributes set on the original since the last copy."""
        for key, (module, counterpart) in list(self._pairs.items()):
            held = self._held[key]
            now = _held(module)
            if len(held) != len(now) or not all(map(operator.is_, held, now)):
                self._update(module, counterpart)

    def _counterpart(self, module: nn.Module) -> nn.Module:
        """Return the counterpart of a module, which is made with those inside it if need be."""
        added = [each for each in module.modules() if id(each) not in self._pairs]
        for each in added:
            # The code of a ScriptModule is not among its attributes.
            is_opaque = isinstance(each, ScriptModule)
            self._pairs[id(each)] = each, each if is_opaque else object.__new__(type(each))
        for each in added:
            self._update(each, self._pairs[id(each)][1])
        return self._pairs[id(module)][1]

    def _update(self, module: nn.Module, counterpart: nn.Module) -> None:
        key, now = id(module), dict(vars(module))
        before = self._copied.get(key, {})
        self._copied[key], self._held[key] = now, _held(module)
        if counterpart is module:
            return
        attributes = vars(counterpart)
        for name in before.keys() - now.keys():
            attributes.pop(name, None)
        for name, value in now.items():
            if name in _OWN:
                attributes[name] = type(value)(
                    (key, self._mapped(item, adopt=name == "_modules"))
                    for key, item in value.items()
                )
            elif name == "training":
                attributes[name] = False
            elif name == "_compiled_call_impl":
                attributes[name] = None  # it runs the original
            elif name not in before or before[name] is not value:
                attributes[name] = self._mapped(value)

    def _mapped(self, value: Any, depth: int = _DEPTH, *, adopt: bool = False) -> Any:
        """Return a value with counterparts in place of modules, or the same object without any.

        :param adopt: whether a module from outside the tree is given a counterpart
        """
        if isinstance(value, nn.Module):
            pair = self._pairs.get(id(value))
            return pair[1] if pair else self._counterpart(value) if adopt else value
        if isinstance(value, MethodType):
            owner = self._mapped(value.__self__, 0)
            return value if owner is value.__self__ else MethodType(value.__func__, owner)
        if isinstance(value, weakref.ref):
            target = value()
            mapped = self._mapped(target, 0)
            return value if mapped is target else weakref.ref(mapped)
        if depth == 0:
            return value
        if type(value) is partial:
            parts = (value.func, value.args, value.keywords)
            func, args, keywords = (self._mapped(part, depth - 1) for part in parts)
            same = all(map(operator.is_, (func, args, keywords), parts))
            return value if same else partial(func, *args, **keywords)
        if type(value) in (dict, OrderedDict):
            items = {key: self._mapped(item, depth - 1) for key, item in value.items()}
            same = all(map(operator.is_, items.values(), value.values()))
            return value if same else type(value)(items)
        if type(value) in (list, tuple, set):
            found = [self._mapped(item, depth - 1) for item in value]
            return value if all(map(operator.is_, found, value)) else type(value)(found)
        return value


def _held(module: nn.Module) -> list[Any]:
    """Return all that a module holds, as far as counterparts have it for themselves."""
    attributes: Mapping[str, Any] = vars(module)
    held = [value for name, value in attributes.items() if name != "training"]
    for name in _OWN:
        held += attributes[name].values()
    return held
