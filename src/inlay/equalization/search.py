"""Follow the channels of a value back to the parameters that can take up a scale for each."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, TypeVar

import torch
from torch.fx import GraphModule, Node

from inlay.equalization.channels import (
    Axis,
    Layout,
    Window,
    aligned,
    layout_of_source,
    leaves_of,
    lone_part,
)
from inlay.equalization.ops import (
    ATTENTION,
    COMMUTING,
    Refusal,
    bias_node,
    commutes,
    is_about_shapes,
    is_tensor,
    norm_of,
    objection,
    op_name,
    parameters_of,
    quantizes_linear,
    shifted_parameter,
    source_of,
    stacked_in,
    times_read,
    weight_source,
)
from inlay.equalization.slices import slices_read_by
from inlay.graph import (
    FoundGroup,
    FoundProducer,
    Source,
    attention_states,
    fake_value,
    mutates,
    observes,
    slots_of,
    weight_use,
)
from inlay.model import PRODUCTS

__all__ = ["Search"]

_T = TypeVar("_T")


@dataclass
class _Trail:
    """What has been found on the way back from a value.

    :param layouts: where the channels are, for every value that is divided
    :param edges: how often an op reads a value that it expects to be divided
    :param makers: ops whose weight has its rows divided
    :param vectors: vectors that are divided, and their users
    """

    layouts: dict[Node, Layout] = field(default_factory=dict)
    edges: dict[tuple[Node, Node], int] = field(default_factory=dict)
    tied: list[Axis] = field(default_factory=list)
    producers: list[tuple[Source, tuple[Axis, ...], float]] = field(default_factory=list)
    makers: set[Node] = field(default_factory=set)
    vectors: set[tuple[Node, Node]] = field(default_factory=set)

    def copy(self) -> "_Trail":
        return _Trail(**{each.name: getattr(self, each.name).copy() for each in fields(self)})


class Search:
    """Follows the channels of one value to the parameters that can take up a scale."""

    def __init__(self, gm: GraphModule) -> None:
        self.gm = gm
        self.readers: list[Node] = []
        self._trail = _Trail()

    @property
    def makers(self) -> set[Node]:
        return self._trail.makers

    @property
    def vectors(self) -> set[tuple[Node, Node]]:
        return self._trail.vectors

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
        self._stacked = stacked_in(self.gm, self.readers, self.makers)
        if self._stacked and len(self._trail.producers) > len(self.makers):
            raise Refusal("a parameter that a whole stack shares cannot have a scale for each")

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
                    for source, axes, offset in self._trail.producers
                )
            ),
            shape=tuple(leaf.size for leaf in leaves),
            tied=tuple(sorted({place[leaf] for leaf in leaves_of(self._trail.tied)})),
            stacked=self._stacked,
        )

    def scales(self, node: Node) -> bool:
        """Whether the result of an op is divided by the scales."""
        return node in self._trail.layouts

    def _divide(self, node: Node, layout: Layout) -> None:
        """Have a value divided by the scales, laid out like this, by dividing what it is made of.

        :raises Refusal: if that cannot be
        """
        known = self._trail.layouts.get(node)
        if known is not None:
            if list(map(leaves_of, known)) != list(map(leaves_of, layout)):
                raise Refusal("its channels meet in another order")
            return
        self._trail.layouts[node] = layout
        if node.op == "placeholder":
            raise Refusal("it comes from outside the graph")
        if mutates(node):
            raise Refusal(f"{op_name(node)} changes it in place")
        if not fake_value(node).is_floating_point() or node.kwargs.get("rounding_mode"):
            raise Refusal(f"{op_name(node)} rounds it")
        if "output" in slots_of(node):
            raise Refusal("what it is computed from is quantized as an output")
        use = weight_use(self.gm, node)
        if use is not None and use.kind in PRODUCTS:
            self._take_up_in_rows(node, layout)
        elif norm_of(self.gm, node):
            self._take_up_in_norm(node, layout)
        elif attention_states(node) is not None:
            self._divide_values(node, layout)
        else:
            self._divide_operands(node, layout)

    def _divide_operands(self, node: Node, layout: Layout) -> None:
        name = op_name(node)
        if self._divide_view(node, layout):
            return
        if commutes(node):
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

    def _divide_view(self, node: Node, layout: Layout) -> bool:
        """Divide what an op shows; False if it is no view.

        If it shows one position of a dimension, all of them are divided or, where that cannot be,
        that one alone.
        """

        def all_positions() -> bool:
            view = layout_of_source(node, layout)
            if view is not None:
                source, inner, repeated = view
                self._trail.tied += repeated
                self._follow(source, node, inner)
            return view is not None

        def one_position() -> bool:
            if part is not None:
                self._follow(part[0], node, part[1])
            return part is not None

        part = lone_part(node, layout)
        ways = [all_positions] if part is None else [all_positions, one_position]
        return self._first_that_works(ways)

    def _first_that_works(self, ways: Iterable[Callable[[], _T]]) -> _T:
        """Try ways to have something divided, one after another."""
        reasons = []
        for way in ways:
            before = self._trail.copy()
            try:
                return way()
            except Refusal as reason:
                self._trail = before
                reasons.append(str(reason))
        raise Refusal(" and ".join(dict.fromkeys(reasons)))

    def _follow(self, source: Any, node: Node, layout: Layout) -> None:
        """Divide what an op reads, and remember that the op expects it."""
        if not isinstance(source, Node) or not isinstance(fake_value(source), torch.Tensor):
            raise Refusal(f"{op_name(node)} reads a constant")
        self._trail.edges[source, node] = self._trail.edges.get((source, node), 0) + 1
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
            self._trail.tied += repeated
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
        self._first_that_works(partial(self._operand, each, node, layout) for each in factors)

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
            self._trail.tied.append(inner)
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
        self._trail.tied += repeated
        self._follow(factor, node, inner)

    def _take_up_in_rows(self, node: Node, layout: Layout) -> None:
        weight, bias = parameters_of(self.gm, node)
        self.makers.add(node)
        self._take_up(weight, layout)
        if bias is not None:
            self._take_up(bias, layout)
            if node.op != "call_module":
                self.vectors.add((bias_node(node), node))

    def _take_up_in_norm(self, node: Node, layout: Layout) -> None:
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
        self._trail.tied += [axis for dim in layout[:-1] for axis in dim]
        self._trail.producers.append((source, layout[-1], offset))

    def _check_readers(self) -> None:
        """Make sure that whoever reads a scaled value expects it, or can make up for it."""
        left = list(self._trail.layouts)
        while left:
            node = left.pop()
            for user in node.users:
                if observes(user) or is_about_shapes(user):
                    continue
                if user not in self._trail.layouts and self._goes_on(node, user):
                    left.append(user)
                if user not in self._trail.layouts and self._reads_other_part(node, user):
                    continue
                if user in self._trail.layouts:
                    expected = self._trail.edges.get((node, user), 0)
                    if expected != times_read(node, user):
                        raise Refusal(f"{op_name(user)} also reads it by another way")
                elif not self._makes_up(node, user):
                    raise Refusal(objection(self.gm, user))

    def _reads_other_part(self, node: Node, user: Node) -> bool:
        """Whether a reader leaves out the part of a value that is scaled."""
        if not any(
            isinstance(leaf, Window) for dim in self._trail.layouts[node] for leaf in leaves_of(dim)
        ):
            return False
        parts = list(slices_read_by(user))
        siblings = (each for other in node.users for each in slices_read_by(other))
        ours = [each for each in siblings if each and each.reader in self._trail.layouts]
        return bool(ours) and all(
            part is not None
            and (part.reader in self._trail.layouts or all(map(part.is_apart_from, ours)))
            for part in parts
        )

    def _goes_on(self, node: Node, user: Node) -> bool:
        """Whether a reader hands the scaled value on as it is; its readers are then looked at."""
        layout, name = self._trail.layouts[node], op_name(user)
        if mutates(user) or any(layout[:-1]) or user.args[:1] != (node,):
            return False
        shape = tuple(fake_value(user).shape) if is_tensor(user) else ()
        is_view = name in ("view", "reshape", "flatten", "getitem", "unsqueeze", "slice")
        if not (name in COMMUTING or is_view) or str(shape[-1:]) != f"({self._channels.size},)":
            return False
        after: Layout = (*[()] * (len(shape) - 1), layout[-1])
        try:
            view = layout_of_source(user, after)
        except Refusal:
            return False
        if view is not None and list(map(leaves_of, view[1])) != list(map(leaves_of, layout)):
            return False
        self._trail.layouts[user] = after
        self._trail.edges[node, user] = 1
        return True

    def _makes_up(self, node: Node, user: Node) -> bool:
        """Whether a reader is a quantized Linear with a weight whose columns can be scaled."""
        use = weight_use(self.gm, user)
        layout = self._trail.layouts[node]
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
