"""Have Dynamo trace the block of a model once, and not every time the model repeats it."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

__all__ = ["TracedOnce"]

# With fewer blocks there is little to save, and each would still be a graph of its own.
_REPEATS = 3


class TracedOnce:
    """The classes of a model's blocks, marked as regions for as long as the model runs.

    Between runs nothing of it is left on the model or its classes.
    """

    def __init__(self, model: nn.Module) -> None:
        self._marked = {
            cls: torch.compiler.nested_compile_region(_forward(cls))
            for cls in _block_classes(model)
        }

    def __bool__(self) -> bool:
        return bool(self._marked)

    @contextmanager
    def __call__(self) -> Iterator[None]:
        own = {cls: vars(cls).get("forward") for cls in self._marked}
        try:
            for cls, marked in self._marked.items():
                cls.forward = marked
            yield
        finally:
            for cls, forward in own.items():
                if forward is None:
                    del cls.forward
                else:
                    cls.forward = forward


def _block_classes(model: nn.Module) -> set[type[nn.Module]]:
    """The classes of modules that stand in rows, with numbers for names; the outermost ones."""
    found: set[type[nn.Module]] = set()
    left = [model]
    while left:
        module = left.pop()
        children = dict(module.named_children())
        counts = Counter(type(child) for name, child in children.items() if name.isdigit())
        repeated = {cls for cls, count in counts.items() if count >= _REPEATS}
        found |= {cls for cls in repeated if _can_be_marked(cls, children.values())}
        left += [child for child in children.values() if type(child) not in repeated]
    return found


def _can_be_marked(cls: type[nn.Module], modules: Any) -> bool:
    """Whether the blocks run the `forward` of their class, which is not one of torch's own."""
    is_of_torch = cls.__module__.partition(".")[0] == "torch"
    return not is_of_torch and not any("forward" in vars(module) for module in modules)


def _forward(cls: type[nn.Module]) -> Callable[..., Any]:
    """A function of the same code, so that the mark is not left on the class's own."""
    forward: Any = cls.forward

    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return forward(self, *args, **kwargs)

    return run
