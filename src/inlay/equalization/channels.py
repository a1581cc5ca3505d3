"""Where the channels of a value are, in the values that it is a view of."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from inlay.equalization.ops import Refusal
from inlay.equalization.slices import Slice, slice_of
from inlay.graph import fake_value, tensor_op

__all__ = [
    "Axis",
    "Layout",
    "Refusal",
    "Window",
    "aligned",
    "layout_of_source",
    "leaves_of",
    "lone_part",
]


@dataclass(eq=False)
class Axis:
    """A part of the channels of a value, cut into smaller ones where an op reshapes it."""

    size: int
    parts: tuple["Axis", ...] = ()

    def leaves(self) -> tuple["Axis", ...]:
        return tuple(leaf for part in self.parts for leaf in part.leaves()) or (self,)

    def split(self, size: int) -> tuple["Axis", "Axis"]:
        """Cut into an outer axis of that size and an inner one."""
        self.parts = (Axis(size), Axis(self.size // size))
        return self.parts


@dataclass(eq=False)
class Window(Axis):
    """A dimension that contains channels beside other things.

    :param start: where the part begins
    :param inner: the axes of the part, outermost first; none if it is one position
    """

    start: int = 0
    inner: tuple[Axis, ...] = ()

    @property
    def length(self) -> int:
        return math.prod(axis.size for axis in self.inner)

    def split(self, size: int) -> tuple[Axis, Axis]:
        raise Refusal("it is reshaped across a part of its channels")


# For each dimension of a value, the axes along it, outermost first; none where it has no channels.
Layout = tuple[tuple[Axis, ...], ...]


def leaves_of(axes: Iterable[Axis]) -> tuple[Axis, ...]:
    """Return what axes have been cut into, so that they can be compared."""
    return tuple(leaf for axis in axes for leaf in axis.leaves())


def layout_of_source(node: Node, layout: Layout) -> tuple[Node, Layout, list[Axis]] | None:
    """Return what a view shows, the channels' layout there, and axes along which they are repeated.

    :param layout: the layout of the view
    :return: None if the op is no view
    :raises Refusal: if it is one and mixes channels with something else
    """
    source = node.args[0] if node.args else node.kwargs.get("input")
    name = tensor_op(node)
    part = slice_of(node)
    if part is not None and not part.drops and layout[part.dim]:
        return part.value, _with_window(part, layout), []
    if not isinstance(source, Node) or not isinstance(fake_value(source), torch.Tensor):
        return None
    if name in _RESHAPES:
        return source, _reshaped(_shape(source), _shape(node), layout), []
    if name in _TRANSPOSES:
        return source, _transposed(node, layout), []
    if name in _EXPANDS:
        return source, *aligned(layout, _shape(node), _shape(source))
    if name == "repeat_interleave":
        return source, *_interleaved(node, layout)
    if name in ("getitem", "slice", "select"):
        return source, _indexed(node, name, layout), []
    return None


def lone_part(node: Node, layout: Layout) -> tuple[Node, Layout] | None:
    """Return what an op reads one position of, and the layout there if only that one is scaled.

    Falcon's values are such a position, beside queries and keys.

    :return: None if the op reads more than one position, or channels lie along them
    """
    part = slice_of(node)
    if part is None or part.stop - part.start != 1:
        return None
    if not part.drops and layout[part.dim]:
        return None
    with_dim = (*layout[: part.dim], (), *layout[part.dim :]) if part.drops else layout
    return part.value, _with_window(part, with_dim)


def _with_window(part: Slice, layout: Layout) -> Layout:
    """Undo an op that reads a part of a dimension."""
    size, inner = _shape(part.value)[part.dim], layout[part.dim]
    if any(isinstance(axis, Window) for axis in leaves_of(inner)):
        raise Refusal("a part of a part of its channels is read")
    if (part.start, part.stop) == (0, size):
        return layout
    window = Window(size, start=part.start, inner=inner)
    return (*layout[: part.dim], (window,), *layout[part.dim + 1 :])


_RESHAPES = {"view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "_unsafe_view"}
_TRANSPOSES = {
    "transpose", "permute", "swapaxes", "swapdims", "movedim", "moveaxis", "t", "T", "mT",
}  # fmt: skip
_EXPANDS = {"expand", "expand_as", "broadcast_to"}


def _shape(node: Node) -> tuple[Any, ...]:
    return tuple(fake_value(node).shape)


def aligned(
    layout: Layout, shape: Sequence[Any], source: Sequence[Any]
) -> tuple[Layout, list[Axis]]:
    """Return the layout of an operand that is broadcast, and the axes along which it is repeated.

    :param shape: the shape of the result, whose layout is given
    :param source: the shape of the operand
    """
    found: list[tuple[Axis, ...]] = []
    repeated = list(leaves_of(axis for dim in layout[: len(shape) - len(source)] for axis in dim))
    first = len(shape) - len(source)
    for dim, size in enumerate(source):
        is_repeated = _is_one(size) and not _is_one(shape[first + dim])
        repeated += layout[first + dim] if is_repeated else ()
        found.append(() if is_repeated else layout[first + dim])
    return tuple(found), repeated


def _reshaped(source: Sequence[Any], shape: Sequence[Any], layout: Layout) -> Layout:
    found: list[tuple[Axis, ...]] = [()] * len(source)
    for before, after in _blocks(source, shape):
        axes = [axis for dim in after for axis in layout[dim]]
        if not axes:
            continue
        if len(before) == len(after) == 1:
            found[before[0]] = layout[after[0]]
            continue
        segments: list[tuple[int, Axis | None]] = []
        for dim in after:
            sized = [(leaf.size, leaf) for leaf in leaves_of(layout[dim])]
            segments += sized or [(_known(shape[dim]), None)]
        for dim in before:
            found[dim] = _taken(segments, _known(source[dim]))
    return tuple(found)


def _taken(segments: list[tuple[int, Axis | None]], size: int) -> tuple[Axis, ...]:
    """Take a dimension of that size from the front of a row of segments, cutting the last one."""
    taken: list[Axis | None] = []
    while size > 1 and segments:
        length, axis = segments.pop(0)
        if length > size:
            if length % size:
                raise Refusal("it is reshaped across its channels")
            outer, inner = (None, None) if axis is None else axis.split(size)
            segments.insert(0, (length // size, inner))
            length, axis = size, outer
        if size % length:
            raise Refusal("it is reshaped across its channels")
        taken.append(axis)
        size //= length
    axes = tuple(axis for axis in taken if axis is not None)
    if axes and len(axes) < len(taken):
        raise Refusal("its channels are merged with another dimension")
    return axes


def _blocks(source: Sequence[Any], shape: Sequence[Any]) -> Iterator[tuple[list[int], list[int]]]:
    """Yield dimensions before and after a reshape that hold the same elements, from the last on.

    Sizes that are not known are equal only if they are the same expression.
    """
    before = [dim for dim, size in enumerate(source) if not _is_one(size)]
    after = [dim for dim, size in enumerate(shape) if not _is_one(size)]
    while before and after:
        left, right = [before.pop()], [after.pop()]
        if str(source[left[0]]) != str(shape[right[0]]):
            sizes = _products(source, left), _products(shape, right)
            while sizes[0] != sizes[1]:
                if None in sizes or not (before if sizes[0] < sizes[1] else after):
                    left, right, before, after = before + left, after + right, [], []
                    break
                if sizes[0] < sizes[1]:
                    left.insert(0, before.pop())
                else:
                    right.insert(0, after.pop())
                sizes = _products(source, left), _products(shape, right)
        yield left, right


def _products(shape: Sequence[Any], dims: Sequence[int]) -> Any:
    sizes = [shape[dim] for dim in dims]
    return math.prod(sizes) if all(isinstance(size, int) for size in sizes) else None


def _known(size: Any) -> int:
    if not isinstance(size, int):
        raise Refusal("its channels are merged with a dimension whose size varies")
    return size


def _is_one(size: Any) -> bool:
    return isinstance(size, int) and size == 1


def _transposed(node: Node, layout: Layout) -> Layout:
    # Sizes that are all different show where each dimension goes.
    sample = torch.empty(tuple(range(2, 2 + len(layout))), device="meta")
    rest, options = node.args[1:], {k: v for k, v in node.kwargs.items() if k != "input"}
    if node.op == "call_method":
        moved = getattr(sample, str(node.target))(*rest, **options)
    else:
        assert callable(node.target)
        moved = node.target(sample, *rest, **options)
    places = {size: dim for dim, size in enumerate(moved.shape)}
    return tuple(layout[places[size]] for size in sample.shape)


def _interleaved(node: Node, layout: Layout) -> tuple[Layout, list[Axis]]:
    """Undo a `repeat_interleave`: its repeats are the inner part of a dimension."""
    given = dict(zip(("repeats", "dim"), node.args[1:], strict=False)) | dict(node.kwargs)
    repeats, dim = given.get("repeats"), given.get("dim")
    if not isinstance(repeats, int) or not isinstance(dim, int):
        raise Refusal("it is repeated in a way that is not known")
    dim %= len(layout)
    if not layout[dim]:
        return layout, []
    (axis,) = leaves_of(layout[dim]) if len(leaves_of(layout[dim])) == 1 else (None,)
    if axis is None or axis.size % repeats:
        raise Refusal("it is repeated across its channels")
    outer, inner = axis.split(axis.size // repeats)
    return (*layout[:dim], (outer,), *layout[dim + 1 :]), [inner]


def _indexed(node: Node, name: str, layout: Layout) -> Layout:
    """Undo an index that takes some positions and all channels."""
    rank = len(_shape(node.args[0]))  # type: ignore[arg-type]
    if name == "getitem":
        index = node.args[1]
        steps = list(index) if isinstance(index, tuple) else [index]
    else:
        dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
        assert isinstance(dim, int)
        chosen = 0 if name == "select" else slice(0, 1)
        steps = [slice(None)] * (dim % rank) + [chosen]
        if name == "slice" and _shape(node) == _shape(node.args[0]):  # type: ignore[arg-type]
            return layout
    named = sum(step is not None and step is not Ellipsis for step in steps)
    if Ellipsis not in [step for step in steps if not isinstance(step, Node)]:
        steps.append(Ellipsis)
    found: list[tuple[Axis, ...]] = []
    left = list(layout)
    for step in steps:
        if step is None:
            left.pop(0)
        elif step is Ellipsis:
            count = rank - named
            found, left = found + left[:count], left[count:]
        elif isinstance(step, int):
            found.append(())
        elif isinstance(step, slice):
            if left[0] and step not in (slice(None), slice(0, None)):
                raise Refusal("a part of its channels is read")
            found.append(left.pop(0))
        else:
            raise Refusal("it is indexed by values")
    return tuple(found)
