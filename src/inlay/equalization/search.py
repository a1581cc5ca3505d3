"""Follow the channels of a value back to the parameters that can take up a scale for each."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from inlay.equalization.channels import (
    Axis,
    Layout,
    LayoutError,
    Window,
    aligned,
    layout_of_source,
    leaves_of,
)
from inlay.equalization.ops import (
    ATTENTION,
    COMMUTING,
    Refusal,
    bias_node,
    is_about_shapes,
    is_tensor,
    norm_of,
    objection,
    op_name,
    parameters_of,
    quantizes_linear,
    shifted_parameter,
    source_of,
    times_read,
    weight_source,
)
from inlay.equalization.parts import parts_read_by
from inlay.graph import (
    FoundGroup,
    FoundProducer,
    Source,
    Use,
    attention_states,
    fake_value,
    mutates,
    observes,
    slots_of,
    transposed_by,
    weight_use,
)
from inlay.nodes.call_region import CallRegion

__all__ = ["Search", "uses_of_parameters"]


class Search:
    """Follows the channels of one value to the parameters that can take up a scale."""

    def __init__(self, gm: GraphModule) -> None:
        self.gm = gm
        self.readers: list[Node] = []
        self.makers: set[Node] = set()  # ops whose weight has its rows divided
        self.vectors: set[tuple[Node, Node]] = set()  # vectors that are divided, and their users
        self._layouts: dict[Node, Layout] = {}
        self._edges: dict[tuple[Node, Node], int] = {}
        self._tied: list[Axis] = []
        self._producers: list[tuple[Source, tuple[Axis, ...], float]] = []

    def run(self, reader: Node) -> None:
        use = weight_use(self.gm, reader)
        assert use is not None
        assert use.value is not None
        value = fake_value(use.value)
        size = value.shape[-1] if isinstance(value, torch.Tensor) else None
        if not isinstance(size, int):
            raise Refusal("the number of its channels is not known")
        self._channels = Axis(size)
        self._divide(use.value, (*[()] * (value.dim() - 1), (self._channels,)))
        self._check_readers()

    def found(self) -> FoundGroup:
        leaves = self._channels.leaves()
        place = {leaf: index for index, leaf in enumerate(leaves)}
        return FoundGroup(
            readers=tuple(dict.fromkeys(weight_source(self.gm, node) for node in self.readers)),
            producers=tuple(
                dict.fromkeys(
                    FoundProducer(
                        source=source,
                        axes=tuple(place[leaf] for leaf in _inside(axes)),
                        offset=offset,
                        rows=_rows(axes),
                    )
                    for source, axes, offset in self._producers
                )
            ),
            shape=tuple(leaf.size for leaf in leaves),
            tied=tuple(sorted({place[leaf] for leaf in leaves_of(self._tied)})),
        )

    def scales(self, node: Node) -> bool:
        """Whether the result of an op is divided by the scales."""
        return node in self._layouts

    def _divide(self, node: Node, layout: Layout) -> None:
        """Have a value divided by the scales, laid out like this, by dividing what it is made of.

        :raises Refusal: if that cannot be
        """
        known = self._layouts.get(node)
        if known is not None:
            if list(map(leaves_of, known)) != list(map(leaves_of, layout)):
                raise Refusal("its channels meet in another order")
            return
        self._layouts[node] = layout
        if node.op == "placeholder":
            raise Refusal("it comes from outside the graph")
        if mutates(node):
            raise Refusal(f"{op_name(node)} changes it in place")
        if "output" in slots_of(node):
            raise Refusal("what it is computed from is quantized as an output")
        use = weight_use(self.gm, node)
        if use is not None and use.kind == "linear":
            self._take_up_in_rows(node, layout)
        elif norm_of(self.gm, node):
            self._take_up_innorm_of(node, layout)
        elif attention_states(node) is not None:
            self._divide_values(node, layout)
        else:
            self._divide_operands(node, layout)

    def _divide_operands(self, node: Node, layout: Layout) -> None:
        name = op_name(node)
        view = layout_of_source(node, layout)
        if view is not None:
            source, layout, repeated = view
            self._tied += repeated
            self._follow(source, node, layout)
        elif name in COMMUTING:
            self._follow(node.args[0], node, layout)
        elif name in ("mul", "multiply"):
            self._divide_one(node, layout)
        elif name in ("add", "sub"):
            for operand in node.args[:2]:
                self._operand(operand, node, layout)
        elif name in ("div", "true_divide", "truediv"):
            self._operand(node.args[0], node, layout)
        elif name in ("matmul", "bmm"):
            self._divide_factor(node, layout)
        else:
            raise Refusal(f"{name} does not commute with a scale per channel")

    def _follow(self, source: Any, node: Node, layout: Layout) -> None:
        """Divide what an op reads, and remember that the op expects it."""
        if not isinstance(source, Node) or not isinstance(fake_value(source), torch.Tensor):
            raise Refusal(f"{op_name(node)} reads a constant")
        self._edges[source, node] = self._edges.get((source, node), 0) + 1
        self._divide(source, layout)

    def _operand(self, operand: Any, node: Node, layout: Layout) -> None:
        """Divide an operand that may be broadcast: a parameter, or what something computes."""
        if not isinstance(operand, Node):
            raise Refusal(f"{op_name(node)} with a constant does not commute with a scale")
        shape, own = fake_value(node).shape, fake_value(operand)
        if not isinstance(own, torch.Tensor):
            raise Refusal(f"{op_name(node)} reads a constant")
        inner, repeated = aligned(layout, shape, own.shape)
        parameter = shifted_parameter(operand)
        if parameter is not None and own.dim() == 1:
            source, offset, user = parameter
            self._tied += repeated
            self._take_up(source_of(source), inner, offset)
            self.vectors.add((source, user or node))
            return
        if repeated:
            raise Refusal(f"{op_name(node)} reads a value that is the same for several channels")
        self._follow(operand, node, inner)

    def _divide_one(self, node: Node, layout: Layout) -> None:
        """Divide one factor of a product: a parameter if there is one, or else what works."""
        factors = [factor for factor in node.args[:2] if isinstance(factor, Node)]
        factors.sort(key=lambda factor: shifted_parameter(factor) is None)
        reasons = []
        for factor in factors:
            before = self._layouts, self._edges, self._tied, self._producers, self.makers
            self._layouts, self._edges = dict(self._layouts), dict(self._edges)
            self._tied, self._producers = list(self._tied), list(self._producers)
            self.makers, vectors = set(self.makers), set(self.vectors)
            try:
                return self._operand(factor, node, layout)
            except (Refusal, LayoutError) as reason:
                self._layouts, self._edges, self._tied, self._producers, self.makers = before
                self.vectors = vectors
                reasons.append(str(reason))
        raise Refusal(" and ".join(dict.fromkeys(reasons)))

    def _divide_values(self, node: Node, layout: Layout) -> None:
        """Divide the values of attention: each output is a sum of them."""
        if "v" in slots_of(node):
            raise Refusal("the values of attention are quantized themselves")
        if node.target not in ATTENTION:
            raise Refusal(f"{op_name(node)} is not known to commute with a scale per channel")
        values = node.args[2] if len(node.args) > 2 else node.kwargs["value"]
        assert isinstance(values, Node)
        if layout[-2]:
            raise Refusal("attention mixes its channels")
        shape, own = fake_value(node).shape, fake_value(values).shape
        heads = layout[-3] if len(layout) > 2 else ()
        if heads and str(own[-3]) != str(shape[-3]):  # queries share heads
            leaves = leaves_of(heads)
            if len(leaves) != 1:
                raise Refusal("attention mixes its channels")
            outer, inner = leaves[0].split(int(own[-3]))
            self._tied.append(inner)
            layout = (*layout[:-3], (outer,), *layout[-2:])
        self._follow(values, node, layout)

    def _divide_factor(self, node: Node, layout: Layout) -> None:
        """Divide the second factor of a product of matrices, such as the values of attention."""
        factor = node.args[1]
        if not isinstance(factor, Node) or len(layout) < 2 or layout[-2]:
            raise Refusal(f"{op_name(node)} mixes its channels")
        own = tuple(fake_value(factor).shape)
        if len(own) < 2:
            raise Refusal(f"{op_name(node)} mixes its channels")
        shape = (*fake_value(node).shape[:-2], own[-2], own[-1])
        inner, repeated = aligned(layout, shape, own)
        self._tied += repeated
        self._follow(factor, node, inner)

    def _take_up_in_rows(self, node: Node, layout: Layout) -> None:
        weight, bias = parameters_of(self.gm, node)
        self.makers.add(node)
        self._take_up(weight, layout)
        if bias is not None:
            self._take_up(bias, layout)
            if node.op != "call_module":
                self.vectors.add((bias_node(node), node))

    def _take_up_innorm_of(self, node: Node, layout: Layout) -> None:
        shape, weight, bias = norm_of(self.gm, node) or ((), None, None)
        if len(shape) != 1 or weight is None:
            raise Refusal("the norm before it has no weight for each channel")
        for parameter in (weight, bias):
            if isinstance(parameter, Node):
                self._take_up(source_of(parameter), layout)
                self.vectors.add((parameter, node))
            elif isinstance(parameter, Source):
                self._take_up(parameter, layout)

    def _take_up(self, source: Source, layout: Layout, offset: float = 0.0) -> None:
        """Have a parameter that lies along the last dimension take up the scales."""
        if not layout[-1]:
            raise Refusal("one number stands for all its channels")
        if any(isinstance(leaf, Window) for dim in layout[:-1] for leaf in leaves_of(dim)):
            raise Refusal("a part of what it is computed from cannot be scaled by itself")
        self._tied += [axis for dim in layout[:-1] for axis in dim]
        self._producers.append((source, layout[-1], offset))

    def _check_readers(self) -> None:
        """Make sure that whoever reads a scaled value expects it, or can make up for it."""
        left = list(self._layouts)
        while left:
            node = left.pop()
            for user in node.users:
                if observes(user) or is_about_shapes(user):
                    continue
                if user not in self._layouts and self._goes_on(node, user):
                    left.append(user)
                if user not in self._layouts and self._reads_other_part(node, user):
                    continue
                if user in self._layouts:
                    expected = self._edges.get((node, user), 0)
                    if expected != times_read(node, user):
                        raise Refusal(f"{op_name(user)} also reads it by another way")
                elif not self._makes_up(node, user):
                    raise Refusal(objection(self.gm, user))

    def _reads_other_part(self, node: Node, user: Node) -> bool:
        """Whether a reader leaves out the part of a value that is scaled."""
        if not any(
            isinstance(leaf, Window) for dim in self._layouts[node] for leaf in leaves_of(dim)
        ):
            return False
        parts = list(parts_read_by(user))
        ours = [p for u in node.users for p in parts_read_by(u) if p and p.reader in self._layouts]
        return bool(ours) and all(
            part is not None
            and (part.reader in self._layouts or all(map(part.is_apart_from, ours)))
            for part in parts
        )

    def _goes_on(self, node: Node, user: Node) -> bool:
        """Whether a reader hands the scaled value on as it is; its readers are then looked at."""
        layout, name = self._layouts[node], op_name(user)
        if mutates(user) or any(layout[:-1]) or user.args[:1] != (node,):
            return False
        shape = tuple(fake_value(user).shape) if is_tensor(user) else ()
        is_view = name in ("view", "reshape", "flatten", "getitem", "unsqueeze", "slice")
        if not (name in COMMUTING or is_view) or str(shape[-1:]) != f"({self._channels.size},)":
            return False
        after: Layout = (*[()] * (len(shape) - 1), layout[-1])
        try:
            view = layout_of_source(user, after)
        except LayoutError:
            return False
        if view is not None and list(map(leaves_of, view[1])) != list(map(leaves_of, layout)):
            return False
        self._layouts[user] = after
        self._edges[node, user] = 1
        return True

    def _makes_up(self, node: Node, user: Node) -> bool:
        """Whether a reader is a quantized Linear of which a weight's columns can be multiplied."""
        use = weight_use(self.gm, user)
        layout = self._layouts[node]
        if use is None or use.value is not node or not quantizes_linear(self.gm, user):
            return False
        in_order = leaves_of(layout[-1]) == self._channels.leaves() and not any(layout[:-1])
        if not in_order or times_read(node, user) != 1:
            raise Refusal("another Linear reads its channels in another order")
        if user not in self.readers:
            self.readers.append(user)
        return True


def _inside(axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
    """The axes of channels, also those that are a part of a dimension."""
    parts = (leaf.inner if isinstance(leaf, Window) else (leaf,) for leaf in leaves_of(axes))
    return leaves_of(axis for inner in parts for axis in inner)


def _rows(axes: tuple[Axis, ...]) -> tuple[tuple[int, int, int], ...]:
    """The rows of a parameter as a grid, and which of them channels are; none if they all are."""
    leaves = leaves_of(axes)
    if not any(isinstance(leaf, Window) for leaf in leaves):
        return ()
    return tuple(
        (leaf.size, leaf.start, leaf.length)
        if isinstance(leaf, Window)
        else (leaf.size, 0, leaf.size)
        for leaf in leaves
    )


def uses_of_parameters(gm: GraphModule, groups: list[Search]) -> Iterator[Use]:
    """Yield all uses of parameters, and the groups that scale them there."""
    reading = {node: number for number, group in enumerate(groups) for node in group.readers}
    making = {node: number for number, group in enumerate(groups) for node in group.makers}
    vectors = {pair: number for number, group in enumerate(groups) for pair in group.vectors}
    for node in gm.graph.nodes:
        if node.op == "call_module":
            yield from _uses_by_module(gm, node, groups, reading.get(node), making.get(node))
        if node.op not in ("placeholder", "get_attr") or not is_tensor(node):
            continue
        source = source_of(node)
        users = [u for user in node.users for u in (user.users if transposed_by(user) else [user])]
        for user in users:
            use = weight_use(gm, user)
            if observes(user) or isinstance(user.target, CallRegion):
                continue  # a region knows its own uses
            if use is not None and use.kind == "linear" and use.weight_node is node:
                yield Use(source, "columns", reading.get(user))
                yield Use(source, "rows", making.get(user))
            elif (node, user) in vectors:
                yield Use(source, "vector", vectors[node, user])
            else:
                yield Use(source, "other", None)


def _uses_by_module(
    gm: GraphModule, node: Node, groups: list[Search], reading: int | None, making: int | None
) -> Iterator[Use]:
    module = gm.get_submodule(str(node.target))
    if isinstance(module, nn.Linear):
        weight, bias = parameters_of(gm, node)
        yield Use(weight, "columns", reading)
        yield Use(weight, "rows", making)
        if bias is not None:
            yield Use(bias, "vector", making)
        return
    number = next((n for n, group in enumerate(groups) if group.scales(node)), None)
    for name, _ in module.named_parameters():
        yield Use(Source(f"{node.target}.{name}", False), "vector", number)
