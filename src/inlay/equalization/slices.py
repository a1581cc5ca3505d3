"""Ops that read a slice of a dimension, such as the values in a projection of queries and all."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from inlay.graph import fake_value, tensor_op

__all__ = ["Slice", "slice_of", "slices_read_by"]

_SPLITS = {"split", "split_with_sizes", "chunk", "tensor_split", "unsafe_split", "unsafe_chunk"}


@dataclass(frozen=True)
class Slice:
    """A node that reads positions `start` to `stop` of one dimension of a value.

    :param drops: whether the result lacks the dimension, as after an index by a number
    """

    value: Node
    reader: Node
    dim: int
    start: int
    stop: int
    drops: bool = False

    def is_apart_from(self, other: "Slice") -> bool:
        """Whether nothing is read by both."""
        return self.dim == other.dim and (self.stop <= other.start or other.stop <= self.start)


def _is_split(node: Node) -> bool:
    """Whether an op gives several values, each of them a part of one."""
    return tensor_op(node) in _SPLITS


def slice_of(node: Node) -> Slice | None:
    """Return which part of what value a node is; None if it is not known to be one."""
    name = tensor_op(node)
    if name == "getitem" and isinstance(node.args[0], Node):
        if _is_split(node.args[0]):
            return _of_split(node.args[0], node)
        return _of_index(node.args[0], node)
    if name in ("slice", "narrow"):
        return _of_slice(node)
    return _of_select(node) if name == "select" else None


def slices_read_by(user: Node) -> Iterator[Slice | None]:
    """Yield the slices of a value that readers use; None for an unknown one."""
    if _is_split(user):
        yield from (slice_of(each) for each in user.users)
    else:
        yield slice_of(user)


def _shape(node: Any) -> tuple[Any, ...] | None:
    value = fake_value(node) if isinstance(node, Node) else None
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None


def _of_split(split: Node, node: Node) -> Slice | None:
    value, index, pieces = split.args[0], node.args[1], fake_value(split)
    shape = _shape(value)
    if shape is None or not isinstance(index, int) or not isinstance(pieces, (tuple, list)):
        return None
    assert isinstance(value, Node)
    given = split.args[2] if len(split.args) > 2 else split.kwargs.get("dim", 0)
    if not isinstance(given, int):
        return None
    dim = given % len(shape)
    sizes = [piece.shape[dim] for piece in pieces]
    if not all(isinstance(size, int) for size in sizes):
        return None
    index %= len(sizes)
    return Slice(value, node, dim, sum(sizes[:index]), sum(sizes[: index + 1]))


def _of_index(value: Node, node: Node) -> Slice | None:
    """Read an index that takes a part of one dimension and all of the others."""
    shape, index = _shape(value), node.args[1]
    if shape is None:
        return None
    steps = list(index) if isinstance(index, tuple) else [index]
    if Ellipsis in [step for step in steps if not isinstance(step, (Node, list))]:
        at = next(place for place, step in enumerate(steps) if step is Ellipsis)
        steps[at : at + 1] = [slice(None)] * (len(shape) - len(steps) + 1)
    found: Slice | None = None
    for dim, step in enumerate(steps):
        if step == slice(None):
            continue
        size = shape[dim] if dim < len(shape) else None
        bounds = _bounds(step, size)
        if bounds is None or found is not None:
            return None
        found = Slice(value, node, dim, *bounds, drops=isinstance(step, int))
    return found


def _bounds(step: Any, size: Any) -> tuple[int, int] | None:
    if not isinstance(size, int):
        return None
    position = step[0] if isinstance(step, list) and len(step) == 1 else step
    if isinstance(position, int):
        return position % size, position % size + 1
    if not isinstance(step, slice) or not all(
        bound is None or isinstance(bound, int) for bound in (step.start, step.stop, step.step)
    ):
        return None
    start, stop, stride = step.indices(size)
    return (start, stop) if stride == 1 and start < stop else None


def _of_select(node: Node) -> Slice | None:
    given = dict(zip(("input", "dim", "index"), node.args, strict=False)) | dict(node.kwargs)
    value, dim, shape = given["input"], given["dim"], _shape(given["input"])
    if shape is None or not isinstance(dim, int):
        return None
    dim %= len(shape)
    bounds = _bounds(given["index"], shape[dim])
    assert isinstance(value, Node)
    return None if bounds is None else Slice(value, node, dim, *bounds, drops=True)


def _of_slice(node: Node) -> Slice | None:
    names = ("input", "dim", "start", "length" if tensor_op(node) == "narrow" else "end", "step")
    given: dict[str, Any] = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    value, dim, start = given["input"], given.get("dim", 0), given.get("start")
    shape = _shape(value)
    if shape is None or not isinstance(dim, int):
        return None
    end = given.get("end")
    if "length" in given:
        if not isinstance(start, int) or start < 0 or not isinstance(given["length"], int):
            return None
        end = start + given["length"]
    dim %= len(shape)
    bounds = _bounds(slice(start, end, given.get("step")), shape[dim])
    return None if bounds is None else Slice(value, node, dim, *bounds)
