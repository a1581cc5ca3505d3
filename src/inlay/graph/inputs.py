"""Inputs of a graph: the model's own, and those that passes add."""

import operator
import re
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import torch
from torch.fx import Graph, GraphModule, Node

from inlay.graph.editing import copy
from inlay.graph.meta import made_by, mark_root, stamp
from inlay.torch_private import example_of, fake_mode_of

__all__ = [
    "MAIN",
    "EqualizedOf",
    "ErrorSums",
    "GraphInput",
    "IntegerSumsOf",
    "IntegersOf",
    "PaddingMask",
    "QParamOf",
    "StatisticOf",
    "WeightOf",
    "add_input",
    "add_qparams",
    "added_input",
    "added_inputs",
    "bind",
    "erase_with_inputs",
    "inputs_of",
    "label_inputs",
    "tensor_of",
]

_INPUT = "inlay_input"  # key of node.meta: what an input that a pass added stands for
_TENSOR = "inlay_tensor"  # key of node.meta: the very tensor that an input is called with
MAIN = "main"  # the sequence of a model that has no more than one


@dataclass(frozen=True)
class _PartOf:
    slot: str
    name: str

    def __str__(self) -> str:
        return f"{self.slot} {self.name}"


class StatisticOf(_PartOf):
    """An input that is a tensor of what a slot has gathered; its observe node updates it."""


class QParamOf(_PartOf):
    """An input that is a qparam of a slot, such as its scale."""


@dataclass(frozen=True)
class _WholeOf:
    owner: str
    _what: ClassVar[str]

    def __str__(self) -> str:
        return f"{self.owner} {self._what}"


class WeightOf(_WholeOf):
    """An input that is the weight of a slot, quantized and dequantized."""

    _what = "folded"


class IntegersOf(_WholeOf):
    """An input that is the weight of a slot as integers, as it is stored."""

    _what = "integers"


class IntegerSumsOf(_WholeOf):
    """An input that is the sums of the integers of a weight, by row."""

    _what = "sums"


class EqualizedOf(_WholeOf):
    """An input that is the scaled copy of a parameter."""

    _what = "equalized"


class ErrorSums(_WholeOf):
    """An input that compare nodes of a module add errors to."""

    _what = "errors"


@dataclass(frozen=True)
class PaddingMask:
    """An input that is True at the valid tokens of a batch, in the layout of the value it is for.

    :param sequence: whose tokens the value has
    :param axes: what each dimension of the value is, but the last one: "batch" or "tokens", "rows"
        or "columns" for tokens that were flattened sequence by sequence or step by step, or ""
    """

    sequence: str
    axes: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.sequence} {' '.join(axis or 'any' for axis in self.axes)} valid"

    def of(self, valid: torch.Tensor) -> torch.Tensor:
        """Arrange a bool tensor (batch, tokens) like the value."""
        kept = [axis for axis in self.axes if axis]
        if kept in (["tokens", "batch"], ["columns"]):
            valid = valid.t()
        if len(kept) == 1:
            valid = valid.reshape(-1)
        sizes = iter(valid.shape)
        return valid.reshape([next(sizes) if axis else 1 for axis in self.axes])

    def example(self, value: torch.Tensor) -> torch.Tensor:
        """Return a mask without data for a value without data."""
        sizes = [n if axis else 1 for n, axis in zip(value.shape, self.axes, strict=False)]
        with torch.no_grad():
            return value.new_empty(sizes, dtype=torch.bool)


# What an input that a pass added stands for. A calibration resolves it to a tensor.
GraphInput: TypeAlias = (
    StatisticOf
    | QParamOf
    | WeightOf
    | IntegersOf
    | IntegerSumsOf
    | EqualizedOf
    | ErrorSums
    | PaddingMask
)


def inputs_of(graph: Graph) -> list[Node]:
    return list(graph.find_nodes(op="placeholder"))


def added_input(value: Any) -> GraphInput | None:
    """Return what an input that a pass added stands for; None for everything else."""
    is_node = isinstance(value, Node)
    found: GraphInput | None = value.meta.get(_INPUT) if is_node else None
    return found


def added_inputs(graph: Graph) -> dict[Node, GraphInput]:
    """Find the inputs that passes added, after the model's own, and what they stand for."""
    return {node: node.meta[_INPUT] for node in inputs_of(graph) if _INPUT in node.meta}


def add_input(graph: Graph, what: GraphInput, value: Any, pass_name: str) -> Node:
    """Add an input after all others, or return the one that is there for the same purpose."""
    for node, existing in added_inputs(graph).items():
        if existing == what:
            return node
    inputs = inputs_of(graph)
    first = next(iter(graph.nodes))
    with graph.inserting_after(inputs[-1]) if inputs else graph.inserting_before(first):
        name = re.sub(r"\W", "_", str(what))
        node = graph.placeholder(f"_{name}" if name[0].isdigit() else name)
    node.meta[_INPUT] = what
    node.meta["example_value"] = value
    return stamp(node, pass_name)


def add_qparams(
    graph: Graph, slot: str, qparams: Mapping[str, Any], like: Any, pass_name: str
) -> dict[str, Node]:
    """Add an input for each qparam of a slot that is a tensor; return these inputs by name.

    :param like: a value without data, whose fake mode the inputs' values share
    """
    mode = fake_mode_of(like)
    return {
        name: add_input(
            graph,
            QParamOf(slot, name),
            tensor if mode is None else mode.from_tensor(tensor, static_shapes=True),
            pass_name,
        )
        for name, tensor in qparams.items()
        if isinstance(tensor, torch.Tensor)
    }


def erase_with_inputs(graph: Graph, node: Node) -> None:
    """Erase a node and the inputs that passes added for it alone."""
    inputs = node.all_input_nodes
    graph.erase_node(node)
    for added in inputs:
        if (
            made_by(added) is not None
            and not added.users
            and added.op in ("placeholder", "get_attr")
        ):
            graph.erase_node(added)


def bind(gm: GraphModule, values: Mapping[GraphInput, torch.Tensor]) -> GraphModule:
    """Turn inputs that passes added into constants of the module, and drop what no op reads.

    Where a weight was folded, the module holds the folded one alone.
    """
    gm = copy(gm)
    for node, what in added_inputs(gm.graph).items():
        name = node.name
        gm.register_buffer(name, values[what])
        with gm.graph.inserting_after(inputs_of(gm.graph)[-1]):
            constant = gm.graph.get_attr(name)
        constant.meta = dict(node.meta)
        node.replace_all_uses_with(constant)
        gm.graph.erase_node(node)
    for node in gm.graph.find_nodes(op="get_attr"):
        if not node.users:
            gm.graph.erase_node(node)
    return copy(gm)  # which takes along the attributes that nodes refer to, and no others


def tensor_of(gm: GraphModule, node: Any) -> torch.Tensor | None:
    """The very tensor behind an input of the graph or an attribute of the module."""
    if not isinstance(node, Node):
        return None
    if node.op == "get_attr":
        value = operator.attrgetter(str(node.target))(gm)
        return value if isinstance(value, torch.Tensor) else None
    if node.op == "placeholder":
        if _TENSOR in node.meta:
            return node.meta[_TENSOR]()  # type: ignore[no-any-return]
        arg = node.meta.get("grapharg")
        value = None if arg is None else example_of(arg)
        return value if isinstance(value, torch.Tensor) else None
    return None


def label_inputs(gm: GraphModule, inputs: Iterable[Any], root: str | None = None) -> GraphModule:
    """Return a copy whose inputs know the tensors that the graph is called with.

    :param root: the name of the module that the graph runs, where it is known
    """
    gm = copy(gm)
    if root is not None:
        mark_root(gm, root)
    for node, value in zip(inputs_of(gm.graph), inputs, strict=True):
        if isinstance(value, torch.Tensor):
            node.meta[_TENSOR] = weakref.ref(value)
    return gm
