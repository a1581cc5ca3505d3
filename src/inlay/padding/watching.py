"""Watch the shapes of values while a model runs a small batch."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from inlay.padding.layouts import Seen, Sizes
from inlay.recipe import Plan
from inlay.torch_private import FakeTensor, HigherOrderOperator, is_grouped_product

__all__ = ["watching"]

_EMBEDDINGS = (F.embedding, torch.embedding)
_RESHAPES = {"view", "reshape", "flatten", "unflatten", "view_as", "reshape_as", "contiguous"}
# What these return need not have its rows in the order in which they were given.
_REORDERING = {
    "gather", "take", "take_along_dim", "index_select", "masked_select", "flip", "fliplr", "flipud",
    "roll", "sort", "argsort", "topk", "scatter", "scatter_", "index", "index_copy", "index_put",
    "index_add", "index_add_", "masked_scatter", "permute_rows", "unique", "repeat_interleave",
}  # fmt: skip


@contextmanager
def watching(model: nn.Module, plan: Plan, sizes: Sizes) -> Iterator[Mapping[str, Sequence[Seen]]]:
    """Collect the inputs of attention and of the ops on weights of a plan.

    :param model: the model that runs; its modules have hooks for as long as the context lasts
    """
    watcher = _Watcher(plan, sizes)
    with ExitStack() as stack:
        for name, module in model.named_modules():
            for handle in watcher.hooks(name, module):
                stack.callback(handle.remove)
        stack.enter_context(watcher)
        yield watcher.seen


class _Watcher(TorchFunctionMode):
    def __init__(self, plan: Plan, sizes: Sizes) -> None:
        super().__init__()
        self._plan, self._sizes = plan, sizes
        self._inside: list[str] = []  # the modules that run now, the innermost one last
        self._stacks: dict[str, list[str]] = {}  # by the module that holds them
        for stack in plan.stacks.values():
            self._stacks.setdefault(stack.holder, []).append(stack.name)
        self._transposes: dict[int, torch.Tensor] = {}  # by identity, with the weight they are of
        self._orders: dict[int, str] = {}  # of tensors with flattened tokens
        self._kept: list[torch.Tensor] = []  # so that identities stay those of one tensor
        self.seen: defaultdict[str, list[Seen]] = defaultdict(list)

    def hooks(self, name: str, module: nn.Module) -> Iterator[Any]:
        def enter(_: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            self._inside.append(name)
            if name in self._stacks:
                given = [v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor)]
                for stack in self._stacks[name] if given else ():
                    self._note(f"{stack}.input", given[0])

        def leave(_: nn.Module, args: Any, result: Any) -> None:
            self._inside.pop()

        yield module.register_forward_pre_hook(enter, with_kwargs=True)
        yield module.register_forward_hook(leave, always_call=True)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_grouped_product(func) and isinstance(args[0], FakeTensor) and args[1].ndim == 3:
            # Without data it is known for some dtypes only.
            result = args[0].new_empty((*args[0].shape[:-1], args[1].shape[-1]))
        else:
            result = func(*args, **(kwargs or {}))
        given = [*args, *(kwargs or {}).values()]
        operands = list(_tensors(given))
        self._note_states(func, args, kwargs or {})
        self._note_weight(func, operands, result)
        for made in _tensors([result]):
            self._follow(func, given, operands, made)
        return result

    def _note(self, name: str, value: torch.Tensor, shape: Sequence[int] | None = None) -> None:
        kept = tuple(value.shape[:-1] if shape is None else shape)
        self.seen[name].append(Seen(kept, self._orders.get(id(value))))

    def _note_states(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        is_flex = isinstance(func, HigherOrderOperator) or func.__name__ == "flex_attention"
        if not self._inside or not (func is F.scaled_dot_product_attention or is_flex):
            return
        names = {"q": "query", "k": "key", "v": "value"}
        for position, (name, argument) in enumerate(names.items()):
            state = args[position] if len(args) > position else kwargs.get(argument)
            if isinstance(state, torch.Tensor) and state.ndim == 4:
                self._note(f"{self._inside[-1]}.{name}", state, (state.shape[0], state.shape[2]))

    def _note_weight(self, func: Any, operands: list[torch.Tensor], result: Any) -> None:
        weights = [(value, self._weight(value)) for value in operands]
        weight = next((own for _, own in weights if own is not None), None)
        if weight is None or not isinstance(result, torch.Tensor):
            return
        others = [value for value, own in weights if own is None and value.ndim > 1]
        if func in _EMBEDDINGS:
            others = [result]
        if not others:
            if weight.ndim == 2 and result.shape == weight.shape[::-1] and len(operands) == 1:
                self._transposes[id(result)] = weight
                self._kept.append(result)
            return
        if result.ndim != others[0].ndim:
            return  # no product
        for module in self._modules(weight, "embedding" if func in _EMBEDDINGS else "linear"):
            self._note(f"{module}.input", others[0])

    def _weight(self, value: torch.Tensor) -> torch.Tensor | None:
        weight = self._transposes.get(id(value), value)
        return weight if self._plan.owner(weight) in self._plan.kinds else None

    def _modules(self, weight: torch.Tensor, kind: str) -> Iterator[str]:
        """Yield the module that runs, if the weight is its own."""
        owner = self._plan.owner(weight, kind, path=self._inside[-1] if self._inside else None)
        if owner is not None:
            yield owner

    def _follow(self, func: Any, given: Any, operands: list[torch.Tensor], made: Any) -> None:
        """Learn in which order a tensor that was made has its tokens, if it has them flattened."""
        if not any(self._is_flat(n) for n in made.shape) or getattr(func, "__name__", "") in (
            _REORDERING
        ):
            return
        if func is torch.Tensor.__getitem__ and _has_tensor(given[1]):
            return
        orders = {self._orders[id(o)] for o in operands if id(o) in self._orders}
        if getattr(func, "__name__", "") in _RESHAPES and operands:
            orders |= self._merged(operands[0].shape, made.shape)
        if len(orders) == 1:
            (self._orders[id(made)],) = orders
            self._kept.append(made)

    def _is_flat(self, size: int) -> bool:
        return any(size == self._sizes.batch * tokens for tokens in self._sizes.tokens.values())

    def _merged(self, before: Sequence[int], after: Sequence[int]) -> set[str]:
        """Tell in which order a reshape merges batch and tokens into one dimension."""
        sizes, found = self._sizes, set()
        for axis, size in enumerate(after):
            for tokens in sizes.tokens.values():
                if size != sizes.batch * tokens:
                    continue
                # A merged dimension begins where as many elements come before it.
                ahead = math.prod(after[:axis])
                start = next((n for n in range(len(before)) if _ahead(before, n) == ahead), None)
                pair = [n for n in before[start:] if n != 1][:2] if start is not None else []
                if pair == [sizes.batch, tokens]:
                    found.add("rows")
                elif pair == [tokens, sizes.batch]:
                    found.add("columns")
        return found


def _ahead(shape: Sequence[int], axis: int) -> int:
    return math.prod(shape[:axis])


def _has_tensor(index: Any) -> bool:
    return any(True for _ in _tensors([index]))


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors(value)
