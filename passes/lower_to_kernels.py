"""Replace quantize-dequantize and the product after it by integer kernels."""

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch.fx import GraphModule, Node

from inlay.graph import (
    IntegersOf,
    IntegerSumsOf,
    Pass,
    PassResult,
    WeightOf,
    WeightUse,
    add_input,
    add_qparams,
    added_input,
    copy,
    erase_with_inputs,
    fake_value,
    is_linear,
    require_nodes,
    require_whole,
    slots_of,
    stamp,
    tensor_op,
    weight_use,
)
from inlay.nodes.kernel_support import (
    missing_kernels,
    unprofitable,
    unsupported_formats,
    unsupported_sizes,
)
from inlay.nodes.kernels import DynamicQParams, Quantize, float8_linear, integer_linear, is_float8
from inlay.nodes.quantize import QuantizeDequantize
from inlay.observers import QParamsDict

__all__ = ["LowerToKernels", "kept_from_kernels"]


@dataclass(frozen=True, kw_only=True)
class LowerToKernels(Pass):
    """Multiply 8-bit values where input and weight of a linear layer are quantized to them.

    Before:                                After:
        x, fc_input_scale, ...                 x, fc_input_scale, fc_weight_integers, ...
        x_q = quantize_dequantize(x, ...)      q = quantize(x, fc_input_scale, ...)
        y = linear(x_q, fc_weight_folded)      y = integer_linear(q, fc_weight_integers, ...)
        return y                               return y

    Layers that read one value share its integers. An input that is quantized dynamically has its
    scales computed by a node of its own. What no kernel computes stays as it is, and
    `kept_from_kernels` says why. Results differ from those of quantize-dequantize in their last
    bits, because a kernel rounds only once. With CUDA, float8 values are multiplied likewise.
    """

    keeps_function: ClassVar[bool] = False
    qparams: Mapping[str, QParamsDict]

    def requires(self, gm: GraphModule) -> None:
        require_whole(gm)

    def call(self, gm: GraphModule) -> PassResult:
        gm = copy(gm)
        done: dict[Node, _Integers] = {}
        found = [node for node, problem in _layers(gm) if problem is None]
        for node in found:
            self._lower(gm, node, done)
        for quantized in done:
            if not quantized.users:
                erase_with_inputs(gm.graph, quantized)
        gm.recompile()
        return PassResult(gm, bool(found))

    def ensures(self, gm: GraphModule) -> None:
        left = (node for node, problem in _layers(gm) if problem is None)
        require_nodes(left, "integer kernels could compute these ops")

    def _lower(self, gm: GraphModule, node: Node, done: dict[Node, "_Integers"]) -> None:
        use = weight_use(gm, node)
        assert use is not None
        assert use.value is not None
        assert use.weight_node is not None
        weight, slot = fake_value(use.weight_node), slots_of(node)["weight"]
        if use.value not in done:
            done[use.value] = self._quantize(gm, use.value)
        given = done[use.value]
        integers = weight.new_empty(weight.shape, dtype=slot.args.pytorch_dtype())
        own = {"scale": self.qparams[slot.name]["scale"]}
        scales = add_qparams(gm.graph, slot.name, own, weight, self.name)
        args: list[Any] = [
            given.integers,
            add_input(gm.graph, IntegersOf(slot.name), integers, self.name),
            given.scale,
            scales["scale"],
        ]
        if given.zero_point is not None:
            sums = weight.new_empty(len(weight), dtype=torch.int32)
            named = IntegerSumsOf(slot.name)
            args += [given.zero_point, add_input(gm.graph, named, sums, self.name)]
        options: dict[str, Any] = {"dtype": fake_value(node).dtype}
        bias = _bias(node)
        if bias is not None:
            options["bias"] = bias
        with gm.graph.inserting_before(node):
            function = float8_linear if is_float8(slot.args) else integer_linear
            lowered = gm.graph.call_function(function, tuple(args), options)
        lowered.meta = dict(node.meta)
        stamp(lowered, self.name)
        node.replace_all_uses_with(lowered)
        operands = node.all_input_nodes
        gm.graph.erase_node(node)
        for operand in operands:  # the folded weight, or a transpose of it
            if not operand.users and operand not in done:
                erase_with_inputs(gm.graph, operand)

    def _quantize(self, gm: GraphModule, quantized: Node) -> "_Integers":
        """Put nodes for the integers of a value before the node that quantizes-dequantizes it."""
        target, graph = quantized.target, gm.graph
        assert isinstance(target, QuantizeDequantize)
        value, *qparams = quantized.args
        assert isinstance(value, Node)
        fake = fake_value(value)
        given: dict[str, Any] = dict(zip(target.names, qparams, strict=True))

        def call(function: Any, args: tuple[Any, ...], example: Any) -> Node:
            node = graph.call_function(function, args)
            node.meta = {**quantized.meta, "example_value": example}
            return stamp(node, self.name)

        with graph.inserting_before(quantized):
            if "scale" not in given:
                scales = DynamicQParams(target.args)
                examples = scales.examples(fake)
                both = call(scales, (value,), examples)
                names = ("scale",) if target.args.symmetric else ("scale", "zero_point")
                for position, name in enumerate(names):
                    given[name] = call(operator.getitem, (both, position), examples[position])
            zero_point = None if target.args.symmetric else given["zero_point"]
            operands = (value, given["scale"], *([] if zero_point is None else [zero_point]))
            integers = fake.new_empty(fake.shape, dtype=target.args.pytorch_dtype())
            return _Integers(
                call(Quantize(target.args), operands, integers), given["scale"], zero_point
            )


def kept_from_kernels(gm: GraphModule) -> Iterator[tuple[Node, str]]:
    """Yield the quantized layers of a finalized graph that no kernel computes, and why."""
    return ((node, problem) for node, problem in _layers(gm) if problem is not None)


class _Integers(NamedTuple):
    """A quantized value."""

    integers: Node
    scale: Any
    zero_point: Any


def _layers(gm: GraphModule) -> Iterator[tuple[Node, str | None]]:
    """Yield ops with a folded weight, and what keeps them from integer kernels, if anything."""
    for node in gm.graph.nodes:
        use = weight_use(gm, node)
        weight = None if use is None else added_input(use.weight_node)
        if use is not None and isinstance(weight, WeightOf):
            yield node, _problem(node, use)


def _problem(node: Node, use: WeightUse) -> str | None:
    if use.kind != "linear":
        what = "products with stacks of weights" if use.kind == "grouped" else f"{use.kind}s"
        return f"no integer kernel computes {what}"
    assert use.value is not None
    assert use.weight_node is not None
    quantized, weight = use.value.target, fake_value(use.weight_node)
    inputs = quantized.args if type(quantized) is QuantizeDequantize else None
    args, device = slots_of(node)["weight"].args, weight.device.type
    problem = unsupported_formats(inputs, args, weight.shape[-1])
    if problem is None and {"alpha", "beta", "out", "out_dtype"} & node.kwargs.keys():
        problem = f"{node.target} is called with {', '.join(node.kwargs)}"
    if problem is None and not isinstance(fake_value(node), torch.Tensor):
        problem = "the dtype of its result is unknown"
    kind = "float" if is_float8(args) else "int"
    problem = problem or missing_kernels(device, kind)
    problem = problem or unsupported_sizes(device, kind, weight.shape)
    return problem or unprofitable(device, fake_value(node).dtype, weight.shape)


def _bias(node: Node) -> Any:
    """Return what an op adds to the product, as far as it adds it itself."""
    if is_linear(node):
        return node.args[2] if len(node.args) > 2 else node.kwargs.get("bias")
    if tensor_op(node) == "addmm":
        return node.args[0] if node.args else node.kwargs.get("input", node.kwargs.get("self"))
    return None
