"""Run the blocks of a model as graphs of their own, so that Dynamo traces one of them for all.

A block runs as compiled code of its own, which Dynamo finds fit for the next block by checking its
guards, in microseconds. Tracing a model then hardly depends on its depth. What is around the blocks
is run as it is where nothing of it is quantized. Otherwise Dynamo traces it, and for it each block
is one call.
"""

import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.fx import Node

from inlay.calibration.tracing import left_alone
from inlay.errors import GraphError
from inlay.nodes.call_region import CallRegion
from inlay.recipe import Plan
from inlay.torch_private import (
    FakeTensorMode,
    allow_real_tensors,
    as_if_traced,
    fake_mode_of,
    graph_break_errors,
    has_hooks,
    mark_varying,
    varying_dims,
)

if TYPE_CHECKING:
    from inlay.calibration.backend import Backend

__all__ = ["Block", "BlockCall", "Blocks", "block_modules", "call_block", "is_block_call"]

_HANDLE = "_inlay_block"  # attribute of a block while its model runs


class Blocks:
    """The blocks of a model, marked for as long as the model runs.

    Between runs nothing of it is left on the model or its classes.
    """

    def __init__(self, model: nn.Module, backend: "Backend") -> None:
        torch.compiler.allow_in_graph(call_block)  # type: ignore[no-untyped-call]
        self._backend = backend
        self._has_run = False  # whether a block has, in the batch that runs now
        self._outputs: weakref.WeakKeyDictionary[FakeTensorMode, dict[Any, Any]] = (
            weakref.WeakKeyDictionary()
        )
        classes = _block_classes(model)
        self._marked = {cls: _marked(cls.forward, call_block) for cls in classes}
        # Dynamo would trace what a call does besides running `forward` anew for each block.
        self._marked_calls = {
            cls: _marked(cls.__call__, call_block) for cls in classes if _is_called(cls)
        }
        run = {cls: self._compiled(cls.forward) for cls in classes}
        self._names = weakref.WeakKeyDictionary({m: name for name, m in model.named_modules()})
        self._blocks = [
            Block(module, type(module).forward, run[type(module)], self._outputs)
            for module in model.modules()
            if type(module) in run
        ]

    def end_in_observing(self, plan: Plan) -> bool:
        """Whether data is observed in the last of the blocks, so that all of them have to run."""
        return bool(self._blocks) and self._blocks[-1].observes(plan)

    def running(self, compiled: Callable[..., Any]) -> list[Callable[..., Any]]:
        """The compiled model as a way to run with its blocks apart, if it has any."""

        def run(*args: Any, **kwargs: Any) -> Any:
            with self._handles(), self._marks():
                return compiled(*args, **kwargs)

        return [self._once_only(run)] if self._marked else []

    def running_around(self, model: Callable[..., Any]) -> list[Callable[..., Any]]:
        """The model as it is as a way to run with its blocks apart, if it has any.

        What is around them takes the turns that it takes when it is traced, so that results do not
        depend on whether it is.
        """

        def run(*args: Any, **kwargs: Any) -> Any:
            varying = _varying_sizes([args, kwargs])

            def call(handle: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
                block = Block.of(handle)
                if varying:
                    _mark_sizes([args, kwargs], varying)
                with as_if_traced(False):  # observers ask, too
                    return block.compiled(block.module, args, kwargs)

            marked = {cls: _marked(cls.forward, call) for cls in self._marked}
            with self._handles(), _methods("forward", marked), as_if_traced():
                return model(*args, **kwargs)

        return [self._once_only(run)] if self._marked else []

    def _once_only(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Refuse to give a batch to another way of running once a block has observed it."""

        def once(*args: Any, **kwargs: Any) -> Any:
            self._has_run = False
            try:
                return run(*args, **kwargs)
            except graph_break_errors() as error:
                if not self._has_run:
                    raise  # nothing of the batch was observed, so another way may run it
                raise GraphError(
                    "a block of the model cannot be traced for this batch, after other blocks have "
                    "observed it, and to run it again would count it twice; give batches of the "
                    "sizes that came before"
                ) from error

        return once

    def _compiled(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(block: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> Any:
            return forward(block, *args, **kwargs)

        compiled = torch.compile(run, backend=self._backend.compile_block, fullgraph=True)

        def noted(block: nn.Module, *args: Any) -> Any:
            with self._backend.inside(self._names[block]):
                result = compiled(block, *args)
            self._has_run = True
            return result

        return noted

    @contextmanager
    def _marks(self) -> Iterator[None]:
        modules = [block.module for block in self._blocks]
        particular = {type(module) for module in modules if module.training or has_hooks(module)}
        calls = {cls: call for cls, call in self._marked_calls.items() if cls not in particular}
        with _methods("forward", self._marked), _methods("__call__", calls):
            yield

    @contextmanager
    def _handles(self) -> Iterator[None]:
        modules = [(block.module, block.handle) for block in self._blocks]
        try:
            for module, handle in modules:
                vars(module)[_HANDLE] = handle
            yield
        finally:
            for module, _ in modules:
                vars(module).pop(_HANDLE, None)


class Block:
    """One block of a model.

    :param forward: the `forward` of its class
    :param compiled: runs it as compiled code of its own
    :param outputs: what blocks return for which arguments, without data, while a model is traced
    """

    def __init__(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        compiled: Callable[..., Any],
        outputs: "weakref.WeakKeyDictionary[FakeTensorMode, dict[Any, Any]]",
    ) -> None:
        self._module = weakref.ref(module)  # compiled code may outlive the model
        self._forward, self.compiled, self._outputs = forward, compiled, outputs
        self.handle = next(_HANDLES)
        _BY_HANDLE[self.handle] = self

    @property
    def module(self) -> nn.Module:
        module = self._module()
        assert module is not None, "a model that runs has its blocks"
        return module

    @staticmethod
    def of(handle: int) -> "Block":
        return _BY_HANDLE[handle]

    def observes(self, plan: Plan) -> bool:
        """Whether data is observed in the block."""
        weights = (getattr(module, "weight", None) for module in self.module.modules())
        tensors = (w for w in weights if isinstance(w, torch.Tensor))
        # Experts have parameters of other names.
        owners = map(plan.owner, itertools.chain(tensors, self.module.parameters()))
        return plan.observes_in(owners)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block as it is."""
        return self._forward(self.module, *args, **kwargs)

    def fake_outputs(self, mode: FakeTensorMode, args: Any, kwargs: Any) -> Any:
        """What the block returns for arguments without data."""
        module = self.module
        # Blocks with equal weights and arguments return equal shapes.
        tensors = itertools.chain(module.parameters(), module.buffers())
        key = (type(module), module.training, _described([*tensors]), _described([args, kwargs]))
        known = self._outputs.setdefault(mode, {})
        if key not in known:
            with allow_real_tensors(mode), left_alone(module):
                known[key] = self.run(*args, **kwargs)
        return _alike(known[key])


_HANDLES = itertools.count()
_BY_HANDLE: "weakref.WeakValueDictionary[int, Block]" = weakref.WeakValueDictionary()


def call_block(handle: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a block. In a graph of Dynamo this is one node, and `BlockCall` takes its place."""
    block = Block.of(handle)
    mode = fake_mode_of(*_tensors([args, kwargs]))
    return block.run(*args, **kwargs) if mode is None else block.fake_outputs(mode, args, kwargs)


@dataclass(frozen=True, eq=False)
class BlockCall:
    """Runs a block as compiled code of its own, in the middle of the graph around it.

    :param varying: places of tensors among the arguments, and their dimensions of no fixed size
    :param fixed: places of tensors among the results, and the sizes of their other dimensions
    """

    block: Block
    varying: tuple[tuple[int, int], ...]
    fixed: tuple[tuple[int, int, int], ...]

    @classmethod
    def like(cls, block: Block, given: Any, results: Any) -> "BlockCall":
        """A call with arguments and results of the same sizes as these, which have no data."""
        return cls(
            block,
            varying=tuple(
                (place, dim) for place, dim, size in _sizes(given) if not isinstance(size, int)
            ),
            fixed=tuple(found for found in _sizes(results) if isinstance(found[2], int)),
        )

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = list(_tensors([args, kwargs])) if self.varying else []
        for place, dim in self.varying:
            mark_varying(tensors[place], dim)
        result = self.block.compiled(self.block.module, args, kwargs)
        results = list(_tensors(result))
        if any(results[place].shape[dim] != size for place, dim, size in self.fixed):
            raise GraphError("a block returns other sizes than one like it")
        return result


def is_block_call(node: Node) -> bool:
    """Whether a node runs a block as compiled code of its own."""
    return isinstance(node.target, CallRegion) and isinstance(node.target.run, BlockCall)


def block_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The blocks of a model by name, in order: modules of one class that stand in a row."""
    classes = _block_classes(model)
    return {name: module for name, module in model.named_modules() if type(module) in classes}


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


def _can_be_marked(cls: type[nn.Module], modules: Iterable[nn.Module]) -> bool:
    """Whether the blocks run the `forward` of their class, which is not one of torch's own."""
    is_of_torch = cls.__module__.partition(".")[0] == "torch"
    return not is_of_torch and not any("forward" in vars(module) for module in modules)


def _is_called(cls: type[nn.Module]) -> bool:
    """Whether a call of a module, in evaluation and without hooks, only runs its `forward`."""
    owner = next(one for one in cls.__mro__ if "__call__" in vars(one))
    # The base class of transformers' blocks calls them differently while it saves gradients.
    return owner is nn.Module or owner.__module__ == "transformers.modeling_layers"


def _marked(method: Callable[..., Any], call: Callable[..., Any]) -> Callable[..., Any]:
    def marked(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        handle = getattr(self, _HANDLE, None)
        if handle is None:  # of another model of the same class
            return method(self, *args, **kwargs)
        return call(handle, args, kwargs)

    return marked


@contextmanager
def _methods(name: str, new: Mapping[type[nn.Module], Callable[..., Any]]) -> Iterator[None]:
    """Give classes other methods of a name for a while."""
    own = {cls: vars(cls).get(name) for cls in new}
    try:
        for cls, method in new.items():
            setattr(cls, name, method)
        yield
    finally:
        for cls, before in own.items():
            if before is None:
                delattr(cls, name)
            else:
                setattr(cls, name, before)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested lists, tuples and mappings."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, Mapping):
        yield from _tensors(list(value.values()))


def _sizes(value: Any) -> Iterator[tuple[int, int, Any]]:
    """Yield the sizes of all tensors: the place of the tensor, the dimension, its size."""
    for place, tensor in enumerate(_tensors(value)):
        for dim, size in enumerate(tensor.shape):
            yield place, dim, size


def _varying_sizes(batch: Any) -> set[int]:
    """Sizes of the dimensions of a batch that are marked as varying."""
    return {tensor.shape[dim] for tensor in _tensors(batch) for dim in varying_dims(tensor)}


def _mark_sizes(value: Any, varying: set[int]) -> None:
    """Mark dimensions as varying by their sizes. Those of a fixed size are found out in tracing."""
    tensors = list(_tensors(value))
    for place, dim, size in _sizes(value):
        if size in varying:
            mark_varying(tensors[place], dim)


def _described(value: Any) -> Any:
    """Something equal for values that a block cannot tell apart without data."""
    if isinstance(value, torch.Tensor):
        return str((tuple(value.shape), value.stride(), value.dtype, value.device))
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, *map(_described, value))
    if isinstance(value, Mapping):
        return tuple((name, _described(item)) for name, item in value.items())
    return repr(value)


def _alike(value: Any) -> Any:
    """The same with tensors of its own."""
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(
            value.size(), value.stride(), dtype=value.dtype, device=value.device
        )
    if type(value) in (list, tuple):
        return type(value)(_alike(item) for item in value)
    if value is None:
        return None
    raise GraphError(f"a block returns a {type(value).__name__}, which a graph cannot hold")
