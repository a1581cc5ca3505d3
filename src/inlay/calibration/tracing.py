"""Ways to have Dynamo trace a model, from the quickest to the one that always works."""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from torch import nn

from inlay.changes import Held, is_container
from inlay.statistics.value import Statistics
from inlay.torch_private import graph_break_errors

if TYPE_CHECKING:
    from inlay.calibration.backend import Backend

__all__ = [
    "Dropped",
    "Enclosed",
    "KeepsError",
    "by_name",
    "first_that_traces",
    "is_of_library",
    "left_alone",
    "on_trial",
    "without_cache",
]


class _ResistsError(Exception):
    """A model cannot be run in this way. Nothing was observed."""


class KeepsError(Exception):
    """A module keeps something of what it runs on."""


class Dropped:
    """Stands for an output that was dropped. A model that keeps it, or reads it, is found out."""

    def __getattr__(self, name: str) -> Any:
        raise KeepsError("an output that was dropped is read")


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
    """Run by a way of which the batches for which it is traced show if it is right for the model.

    Where outputs are dropped, a model that keeps some of them would keep nothing instead. Where
    blocks run on their own, they would not see what the model keeps on its way. Nothing is looked
    at for other batches: whatever a model does otherwise, it is traced for.

    :param resisting: the errors that say that another way should be tried
    """
    has_run = False

    def tried(*args: Any, **kwargs: Any) -> Any:
        nonlocal has_run
        before: list[tuple[Mapping[str, Statistics], Held]] = []

        def note() -> None:
            if not before:
                before.append((backend.bindings.statistics.snapshot(), Held(_places(model))))

        if not has_run:
            note()
        backend.on_trace = note
        try:
            result = run(*args, **kwargs)
            for _, held in before:
                _require_unchanged(model, held)
        except resisting as error:
            if not before:
                raise
            # Something may have been observed before it came to this.
            backend.start_again(before[0][0])
            raise _ResistsError from error
        finally:
            backend.on_trace = None
        has_run = True
        return result

    return tried


@contextmanager
def left_alone(module: nn.Module) -> Iterator[None]:
    """Raise if a module, or one in it, keeps something of what it runs on, and undo that.

    In a graph, what a module keeps is there once the graph has run, and not before: blocks that run
    on their own would not see it. It may be kept on the module, in a list, in another object or in
    a global variable.
    """
    held = Held(_places(module))
    yield
    _require_unchanged(module, held)


def _require_unchanged(module: nn.Module, held: Held) -> None:
    changed = held.changed()
    if changed:
        held.put_back()
        shown = ", ".join(dict.fromkeys(changed))
        raise KeepsError(f"{type(module).__name__} keeps something of what it runs on, in {shown}")


def _places(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield everything in which modules could keep something, each once."""
    met: set[int] = set()
    sources: set[str] = set()
    for name, one in module.named_modules():
        yield name, vars(one)
        for kept in (one._buffers, one._parameters, one._modules):
            yield name, kept
        if not is_of_library(one):
            sources.add(type(one).__module__)
        given = {key: value for key, value in vars(one).items() if key not in _OF_EVERY_MODULE}
        yield from _inside(given, f"{name}.".lstrip("."), met, depth=3)
    for source in sources:
        if source in sys.modules:
            space = vars(sys.modules[source])
            yield "", space
            yield from _inside(space, "", met, depth=1)


def is_of_library(module: nn.Module) -> bool:
    """Whether a module is of torch or transformers.

    Their code, which many models share, keeps nothing of one in globals and uses blocks as wholes.
    """
    return type(module).__module__.partition(".")[0] in ("torch", "transformers")


def _inside(
    named: Mapping[Any, Any], prefix: str, met: set[int], depth: int
) -> Iterator[tuple[str, Any]]:
    """Yield the containers, and the attributes of objects, among values and what these hold."""
    for key, value in list(named.items()):
        if id(value) in met or _is_plain(value) or str(key).startswith("__"):
            continue
        met.add(id(value))
        held = value if is_container(value) else getattr(value, "__dict__", None)
        # Nobody keeps what a batch was in a table, and to look through one takes long.
        if held is None or len(held) > _LARGE:
            continue
        yield f"{prefix}{key}", held
        if depth > 1:
            inner = held if isinstance(held, dict) else dict(enumerate(held))
            yield from _inside(inner, f"{prefix}{key}.", met, depth - 1)


def _is_plain(value: Any) -> bool:
    """Whether a value holds nothing that a model would keep in it."""
    is_of_torch = type(value).__module__.partition(".")[0] == "torch"
    return is_of_torch or isinstance(
        value, (nn.Module, type, ModuleType, FunctionType, str, bytes, int, float, type(None))
    )


_LARGE = 1000
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))  # hooks and the like
