"""Tracing strategies: ways to have Dynamo trace a model, from the fastest to the safest."""

import inspect
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from torch import nn

from inlay.changes import Held, is_container
from inlay.errors import GraphError, StatisticsError
from inlay.torch_private import cause_of, is_tracing_error

if TYPE_CHECKING:
    from inlay.calibration.backend import Backend
    from inlay.calibration.graph_store import GraphStore

__all__ = [
    "BranchesError",
    "Dropped",
    "Enclosed",
    "KeepsError",
    "Strategies",
    "Strategy",
    "by_name",
    "call",
    "is_of_library",
    "left_alone",
    "watched_while_traced",
    "without_cache",
]


class KeepsError(Exception):
    """A module keeps something of what it runs on."""


class BranchesError(GraphError):
    """A model branches on values of tensors. After a break there, code may run untraced."""


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


def call(function: Callable[..., Any], batch: Any) -> Any:
    """Call a function with a batch: keyword arguments by name, or positional ones."""
    return function(**batch) if isinstance(batch, Mapping) else function(*batch)


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


@dataclass(frozen=True)
class Strategy:
    """One way to trace and run a model.

    :param description: description for people
    """

    description: str
    run: Callable[..., Any]


class Strategies:
    """Runs batches by the first strategy that can trace the model, and by that one from then on.

    A batch that fails leaves no statistics. A strategy is given up only for an error of tracing,
    and only if a later one runs the same batch: a bad batch says nothing about the model.

    :param store: keeps the graphs of all strategies
    :param strategies: all of them run the same; the last one accepts graph breaks
    """

    def __init__(self, store: "GraphStore", strategies: Sequence[Strategy]) -> None:
        self._store, self._left = weakref.ref(store), list(strategies)
        self._given_up: list[str] = []
        self._has_run = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        store = self._store()
        assert store is not None, "the store runs its strategies"
        statistics = store.bindings.statistics
        before = None if statistics.is_final else statistics.snapshot()
        failed: list[str] = []
        for number, strategy in enumerate(self._left):
            graphs, pieces = len(store), len(store.auto.pieces)
            try:
                result = strategy.run(*args, **kwargs)
            except BaseException as error:
                store.rewind(before)
                if number == len(self._left) - 1 or not _cannot_trace(error):
                    raise
                failed.append(f"gave up {strategy.description}: {_reason(error)}")
                continue
            if failed:
                store.forget_given_up(graphs, pieces)
                del self._left[:number]
                self._given_up += failed
            self._has_run = True
            return result

    def described(self) -> list[str]:
        """Say which strategy runs, and why others were given up."""
        if not self._has_run:
            return []
        return [f"tracing strategy: {self._left[0].description}", *self._given_up]


def _cannot_trace(error: BaseException) -> bool:
    """Return whether an error says that code cannot be traced, and nothing about the batch.

    A block that runs twice, on values of two dtypes, has no graph for both: a StatisticsError.
    """
    found = cause_of(error)
    if isinstance(found, BranchesError):
        return False
    return isinstance(found, (GraphError, StatisticsError, KeepsError)) or is_tracing_error(found)


def _reason(error: BaseException) -> str:
    lines = str(cause_of(error)).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def watched_while_traced(
    run: Callable[..., Any], model: nn.Module, backend: "Backend"
) -> Callable[..., Any]:
    """Return `run`, which then refuses models that keep something in a batch they are traced for.

    Where outputs are dropped, a model would keep nothing instead of these. Where blocks are single
    nodes, they would not see what the model keeps on its way. Other batches are not watched: if a
    model does something else with one, it is traced again for it.

    :raises KeepsError: while it runs
    """
    has_run = False

    def watched(*args: Any, **kwargs: Any) -> Any:
        nonlocal has_run
        held: list[Held] = []

        def note() -> None:
            if not held:
                held.append(Held(_places(model)))

        if not has_run:
            note()
        with backend.store.tracing_noted(note):
            result = run(*args, **kwargs)
        for before in held:
            _require_unchanged(model, before)
        has_run = True
        return result

    return watched


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
        # Tables of batch contents are rare, and searching one takes long.
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
