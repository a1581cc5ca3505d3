"""Have Dynamo trace the block of a model once, and not every time the model repeats it."""

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from inlay.torch_private import graph_break_errors

__all__ = ["TracedOnce", "first_that_traces", "without_cache"]


class _ResistsError(Exception):
    """A model could not be traced with blocks as regions."""


class TracedOnce:
    """The classes of a model's blocks, marked as regions for as long as the model runs.

    Between runs nothing of it is left on the model or its classes.
    """

    def __init__(self, model: nn.Module) -> None:
        self._marked = {cls: _marked_forward(cls) for cls in _block_classes(model)}

    def running(
        self, compiled: Callable[..., Any], traced: Callable[[], int]
    ) -> list[Callable[..., Any]]:
        """The compiled model as a way to run with blocks traced once, if there are any.

        :param traced: tells how many graphs were traced so far
        """

        def run(*args: Any, **kwargs: Any) -> Any:
            try:
                with self._marks():
                    return compiled(*args, **kwargs)
            except Exception as error:
                # Regions are young, and fail in more ways than by a break. If the model itself is
                # at fault, tracing it as it is says so.
                if traced():
                    raise
                raise _ResistsError from error

        return [run] if self._marked else []

    @contextmanager
    def _marks(self) -> Iterator[None]:
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


def without_cache(model: nn.Module, batch: Mapping[str, Any]) -> Mapping[str, Any]:
    """The batch, and that the model is to keep no keys and values.

    Nobody reads them, and a block that keeps some is traced every time.
    """
    if "use_cache" in batch or "use_cache" not in inspect.signature(model.forward).parameters:
        return batch
    return {**batch, "use_cache": False}


def first_that_traces(ways: Sequence[Callable[..., Any]]) -> Callable[..., Any]:
    """Run by the first way whose graph Dynamo can trace without a break, from then on by that one.

    :param ways: ways to run the same; the last one takes breaks
    """
    left = list(ways)
    resisting: tuple[type[Exception], ...] = (_ResistsError, *graph_break_errors())

    def run(*args: Any, **kwargs: Any) -> Any:
        while len(left) > 1:
            try:
                return left[0](*args, **kwargs)
            except resisting:
                del left[0]
        return left[0](*args, **kwargs)

    return run


def _block_classes(model: nn.Module) -> set[type[nn.Module]]:
    """The classes of modules that stand in rows, with numbers for names; the outermost ones."""
    found: set[type[nn.Module]] = set()
    left = [model]
    while left:
        module = left.pop()
        children = dict(module.named_children())
        counts = Counter(type(child) for name, child in children.items() if name.isdigit())
        repeated = {cls for cls, count in counts.items() if count > 1}
        found |= {cls for cls in repeated if _can_be_marked(cls, children.values())}
        left += [child for child in children.values() if type(child) not in repeated]
    return found


def _can_be_marked(cls: type[nn.Module], modules: Any) -> bool:
    """Whether the blocks run the `forward` of their class, which is not one of torch's own."""
    is_of_torch = cls.__module__.partition(".")[0] == "torch"
    return not is_of_torch and not any("forward" in vars(module) for module in modules)


def _marked_forward(cls: type[nn.Module]) -> Callable[..., Any]:
    """A `forward` that runs the class's own as a region.

    The region takes what the block is called with as a row of tensors and constants. For keyword
    arguments and tuples Dynamo would trace torch's own flattening, with every call.
    """
    forward: Any = cls.forward

    def run(self: nn.Module, form: str, *values: Any) -> Any:
        args, kwargs = _unflatten(form, values)
        return forward(self, *args, **kwargs)

    region = torch.compiler.nested_compile_region(run)

    def marked(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        form, values = _flatten(args, kwargs)
        return region(self, form, *values)

    return marked


def _flatten(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[str, list[Any]]:
    """Arguments as a row of values, and a text that tells how to put them back.

    Dynamo traces this for every block, so it is as plain as can be.
    """
    form = ""
    values: list[Any] = []
    for name, value in [*[("", value) for value in args], *kwargs.items()]:
        if type(value) is tuple:
            form += f"{name}:{len(value)};"
            values += value
        else:
            form += f"{name};"
            values.append(value)
    return form, values


def _unflatten(form: str, values: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    at = 0
    for entry in form.split(";")[:-1]:
        name, is_tuple, length = entry.partition(":")
        size = int(length) if is_tuple else 1
        value = tuple(values[at : at + size]) if is_tuple else values[at]
        at += size
        if name:
            kwargs[name] = value
        else:
            args.append(value)
    return args, kwargs
