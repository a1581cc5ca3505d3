"""Run the blocks of a model as compiled code of their own, so that Dynamo traces one for all.

Dynamo finds compiled code fit for the next block by checking its guards, in microseconds, so the
time to trace a model hardly depends on its depth. Where nothing around the blocks is observed, the
model around them runs eagerly. Otherwise Dynamo traces it, with one node for each call of a block.

Both happen on a copy of the modules that shares all parameters: the user's modules and their
classes are never changed, and several threads can calibrate models of one class.
"""

import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.fx import Node

from inlay.calibration.tracing.strategies import Enclosed, left_alone
from inlay.errors import GraphError
from inlay.nodes.call_body import CallBody
from inlay.nodes.fast_linear import fast_linear, is_float32_on_cpu
from inlay.products import onednn_is_faster
from inlay.recipe import Plan
from inlay.torch_private import (
    FakeTensorMode,
    SharedCopy,
    allow_real_tensors,
    fake_mode_of,
    mark_varying,
    varying_dims,
)

if TYPE_CHECKING:
    from inlay.calibration.backend import Backend

__all__ = ["Block", "BlockCall", "Blocks", "block_modules", "call_block", "is_block_call"]


@dataclass
class _Batch:
    """What blocks need to know of the batch that runs.

    :param varying: sizes of its dimensions that are marked as varying
    :param calls: how often it has called a block so far
    """

    varying: set[int] = field(default_factory=set)
    calls: int = 0


class Blocks:
    """The blocks of a copy of the model. Each runs as compiled code of its own.

    :param backend: prepares the graphs of blocks, and of the model around them
    :param observing: a plan; blocks of classes in which it observes nothing, such as those of a
        vision tower, stay part of what is around the blocks. None for all blocks
    """

    def __init__(self, model: nn.Module, backend: "Backend", observing: Plan | None = None) -> None:
        torch.compiler.allow_in_graph(call_block)  # type: ignore[no-untyped-call]
        self._backend, self._batch = backend, _Batch()
        self._copy = SharedCopy(model)
        outputs: weakref.WeakKeyDictionary[FakeTensorMode, dict[Any, Any]]
        outputs = weakref.WeakKeyDictionary()
        run = {cls: self._compiled(cls.forward) for cls in _block_classes(model)}
        self._blocks = [
            Block(
                module,
                self._copy.of(module),
                partial(self._run_inside, name, run[type(module)]),
                outputs,
                self._batch,
            )
            for name, module in _blocks_to_compile(model, observing).items()
        ]

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def root(self) -> nn.Module:
        """The copy of the model that calls the blocks."""
        return self._copy.root

    def end_in_observing(self, plan: Plan) -> bool:
        """Return whether data is observed in the last block, so that all of them have to run."""
        return bool(self._blocks) and self._blocks[-1].observes(plan)

    def traced_around(self) -> Callable[..., Any]:
        """Return the copy, compiled as one graph that calls the blocks."""
        return torch.compile(Enclosed(self.root), backend=self._backend, fullgraph=True)

    def eager_around(self, model: Callable[..., Any]) -> Callable[..., Any]:
        """Return how to run the copy eagerly around its blocks.

        :param model: the copy, or a function that calls it
        """
        self._speed_up_around()

        def run(*args: Any, **kwargs: Any) -> Any:
            self._batch.varying, self._batch.calls = _varying([args, kwargs]), 0
            result = model(*args, **kwargs)
            if not self._batch.calls:
                raise GraphError("the batch ran through none of the blocks that were found")
            return result

        return run

    def refreshed(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return `run`, which then copies first what was set on the model since the last batch."""

        def refreshing(*args: Any, **kwargs: Any) -> Any:
            self._copy.refresh()
            return run(*args, **kwargs)

        return refreshing

    def _speed_up_around(self) -> None:
        """Leave products around the blocks, such as that of a head, to the faster library."""
        inside = {id(each) for block in self._blocks for each in block.counterpart.modules()}
        for module in self.root.modules():
            if type(module) is not nn.Linear or "forward" in vars(module):
                continue
            if id(module) not in inside:
                vars(module)["forward"] = partial(self._linear, weakref.ref(module))

    def _linear(self, layer: "weakref.ref[nn.Linear]", value: torch.Tensor) -> torch.Tensor:
        module = layer()
        assert module is not None, "a layer that is called is there"
        can_be_faster = is_float32_on_cpu(value) and is_float32_on_cpu(module.weight)
        if can_be_faster and self._backend.store.is_rerun and onednn_is_faster():
            return fast_linear(value, module.weight, module.bias)
        return type(module).forward(module, value)

    def _compiled(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(block: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> Any:
            return forward(block, *args, **kwargs)

        return torch.compile(run, backend=self._backend.compile_block, fullgraph=True)

    def _run_inside(self, name: str, run: Callable[..., Any], *args: Any) -> Any:
        with self._backend.store.inside(name):
            return run(*args)


class Block:
    """One block of a model, whose counterpart in a copy of the model runs as compiled code.

    :param module: the block in the model
    :param counterpart: the one in the copy; it is given a `forward` of its own
    :param compiled: runs a block as compiled code
    :param outputs: results of blocks by their arguments, without data, while a model is traced
    """

    def __init__(
        self,
        module: nn.Module,
        counterpart: nn.Module,
        compiled: Callable[..., Any],
        outputs: "weakref.WeakKeyDictionary[FakeTensorMode, dict[Any, Any]]",
        batch: _Batch,
    ) -> None:
        # Compiled code may outlive the model.
        self._module, self._counterpart = weakref.ref(module), weakref.ref(counterpart)
        self._compiled, self._outputs, self._batch = compiled, outputs, batch
        self.handle = handle = next(_HANDLES)
        _BY_HANDLE[handle] = self

        def forward(*args: Any, **kwargs: Any) -> Any:
            return call_block(handle, args, kwargs)

        vars(counterpart)["forward"] = forward

    @property
    def module(self) -> nn.Module:
        """The block in the model."""
        module = self._module()
        assert module is not None, "a model that runs has its blocks"
        return module

    @property
    def counterpart(self) -> nn.Module:
        """The block in the copy of the model."""
        module = self._counterpart()
        assert module is not None, "a model that is traced has its blocks"
        return module

    @staticmethod
    def of(handle: int) -> "Block":
        return _BY_HANDLE[handle]

    def observes(self, plan: Plan) -> bool:
        """Return whether data is observed in the block."""
        return _observes(self.module, plan)

    def run(self, args: Any, kwargs: Any) -> Any:
        """Run the block as compiled code."""
        return self._compiled(self._counterpart(), args, kwargs)

    def run_in_batch(self, args: Any, kwargs: Any) -> Any:
        """Run the block as compiled code, with what it needs to know of the batch."""
        batch = self._batch
        if batch.varying:
            _mark_sizes([args, kwargs], batch.varying)
        result = self.run(args, kwargs)
        batch.calls += 1
        return result

    def fake_outputs(self, mode: FakeTensorMode, args: Any, kwargs: Any) -> Any:
        """Return what the block returns for arguments without data."""
        module = self.counterpart
        # Blocks with equal weights and arguments return equal shapes.
        tensors = itertools.chain(module.parameters(), module.buffers())
        key = (type(module), module.training, _described([*tensors]), _described([args, kwargs]))
        known = self._outputs.setdefault(mode, {})
        if key not in known:
            with allow_real_tensors(mode), left_alone(module):
                known[key] = type(module).forward(module, *args, **kwargs)
        return _alike(known[key])


_HANDLES = itertools.count()
_BY_HANDLE: "weakref.WeakValueDictionary[int, Block]" = weakref.WeakValueDictionary()


def call_block(handle: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a block. In a graph of Dynamo this is one node, and `BlockCall` takes its place."""
    block = Block.of(handle)
    mode = fake_mode_of(*_tensors([args, kwargs]))
    if mode is None:
        return block.run_in_batch(args, kwargs)
    return block.fake_outputs(mode, args, kwargs)


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
        result = self.block.run(args, kwargs)
        results = list(_tensors(result))
        if any(results[place].shape[dim] != size for place, dim, size in self.fixed):
            raise GraphError("a block returns other sizes than one like it")
        return result


def is_block_call(node: Node) -> bool:
    """Whether a node runs a block as compiled code of its own."""
    return isinstance(node.target, CallBody) and isinstance(node.target.run, BlockCall)


def block_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The blocks of a model by name, in order: modules of one class that stand in a row."""
    classes = _block_classes(model)
    return {name: module for name, module in model.named_modules() if type(module) in classes}


def _blocks_to_compile(model: nn.Module, plan: Plan | None) -> dict[str, nn.Module]:
    """Return the blocks whose classes a plan observes, or all."""
    blocks = block_modules(model)
    if plan is None:
        return blocks
    classes = {type(module) for module in blocks.values() if _observes(module, plan)}
    return {name: module for name, module in blocks.items() if type(module) in classes}


def _observes(block: nn.Module, plan: Plan) -> bool:
    """Return whether data is observed in a block."""
    weights = (getattr(module, "weight", None) for module in block.modules())
    tensors = (w for w in weights if isinstance(w, torch.Tensor))
    # Stacks of weights have parameters of other names.
    return plan.observes_in(map(plan.owner, itertools.chain(tensors, block.parameters())))


def _block_classes(model: nn.Module) -> set[type[nn.Module]]:
    """The classes of modules that stand in rows, with numbers for names; the outermost ones."""
    found: set[type[nn.Module]] = set()
    left = [model]
    while left:
        module = left.pop()
        children = dict(module.named_children())
        counts = Counter(type(child) for name, child in children.items() if name.isdigit())
        repeated = {cls for cls, count in counts.items() if count > 1}
        found |= {cls for cls in repeated if _can_be_compiled(cls, children.values())}
        left += [child for child in children.values() if type(child) not in repeated]
    return found


def _can_be_compiled(cls: type[nn.Module], modules: Iterable[nn.Module]) -> bool:
    """Return whether blocks run the `forward` of their class, which is not one of torch's own."""
    is_of_torch = cls.__module__.partition(".")[0] == "torch"
    return not is_of_torch and not any("forward" in vars(module) for module in modules)


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


def _varying(batch: Any) -> set[int]:
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
