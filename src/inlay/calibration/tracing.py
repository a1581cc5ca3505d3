"""Ways to have Dynamo trace a model, from the quickest to the one that always works."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn

from inlay.torch_private import graph_break_errors

if TYPE_CHECKING:
    from inlay.calibration.backend import Backend

__all__ = [
    "Enclosed",
    "KeepsError",
    "by_name",
    "first_that_traces",
    "left_alone",
    "on_trial",
    "without_cache",
]


class _ResistsError(Exception):
    """A model cannot be run in this way. Nothing was observed."""


class KeepsError(Exception):
    """A module keeps something of what it runs on."""


class Enclosed(nn.Module):
    """A model inside a module of Inlay's own, so that Dynamo traces the model itself.

    The user may have compiled the model in place, and then calling it runs that code. Dynamo also
    keeps a limited number of compilations for each `forward`, which are the user's.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)


def without_cache(model: nn.Module, batch: Mapping[str, Any]) -> Mapping[str, Any]:
    """The batch, and that the model is to keep no keys and values.

    Nobody reads them, and a block that keeps some cannot run as a graph of its own.
    """
    if "use_cache" in batch or "use_cache" not in inspect.signature(model.forward).parameters:
        return batch
    return {**batch, "use_cache": False}


def by_name(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """The arguments of a batch, each with its name where the model gives it one.

    Attention masks are known by their names, which positional arguments of `Enclosed` have not.
    """
    parameters = list(inspect.signature(model.forward).parameters.values())[: len(args)]
    named = [p.name for p in parameters if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    if len(named) < len(args):
        return args, kwargs
    return (), {**dict(zip(named, args, strict=True)), **kwargs}


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


def on_trial(
    run: Callable[..., Any],
    model: nn.Module,
    backend: "Backend",
    resisting: type[Exception] = KeepsError,
) -> Callable[..., Any]:
    """Run by a way of which the first batch shows whether it is right for the model.

    Where outputs are dropped, a model that keeps some of them would keep nothing instead.

    :param resisting: the errors that say that another way should be tried
    """
    is_proven = False

    def tried(*args: Any, **kwargs: Any) -> Any:
        nonlocal is_proven
        if is_proven:
            return run(*args, **kwargs)
        before = backend.bindings.statistics.snapshot()
        try:
            with left_alone(model):
                result = run(*args, **kwargs)
        except resisting as error:
            # Something may have been observed before it came to this.
            backend.start_again(before)
            raise _ResistsError from error
        is_proven = True
        return result

    return tried


@contextmanager
def left_alone(module: nn.Module) -> Iterator[None]:
    """Raise if a module, or one in it, keeps something of what it runs on, and undo that."""
    before = [
        (kept, dict(kept))
        for one in module.modules()
        for kept in (vars(one), one._buffers, one._parameters)
    ]
    yield
    changed = [
        (kept, values)
        for kept, values in before
        if kept.keys() != values.keys() or any(kept[name] is not values[name] for name in values)
    ]
    for kept, values in changed:
        kept.clear()
        kept.update(values)
    if changed:
        raise KeepsError(f"{type(module).__name__} keeps something of what it runs on")
