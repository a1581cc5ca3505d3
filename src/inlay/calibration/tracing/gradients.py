"""Run a model with its blocks traced, so that gradients reach one block at a time.

The forward pass keeps the inputs of blocks and nothing inside them. The backward pass runs each
block again, from the last to the first. So memory holds the activations of a single block.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from inlay.calibration.tracing.blocks import block_modules
from inlay.errors import GraphError
from inlay.graph import copy, inputs_of, weight_use
from inlay.model import PRODUCTS
from inlay.nodes.routing import routing_of
from inlay.passes import InlineCalls
from inlay.torch_private import SharedCopy

__all__ = ["Gradients", "Product", "TracedModel"]


@dataclass(frozen=True)
class Product:
    """A product with a weight in a traced block.

    :param kind: of the op, of `inlay.model.PRODUCTS`
    :param weight: the place of the weight among the inputs of the graph
    """

    kind: str
    weight: int


# Takes the weight, the kind of the op, the gradient of its output, and where the rows end that
# belong to each matrix of a stack; None for an op with a single matrix.
Gradients = Callable[[torch.Tensor, str, torch.Tensor, torch.Tensor | None], None]


class TracedModel:
    """A copy of a model that shares its weights, and whose blocks are traced when they first run.

    A model without blocks is traced as a whole.

    :param take: is given the gradient of each product's output, block by block
    """

    def __init__(self, model: nn.Module, take: Gradients) -> None:
        self._copied, self._take = SharedCopy(model), take
        blocks = block_modules(model) or {"": model}
        self._tape: list[_Ran] = []
        run = {
            cls: self._compiled(cls.forward) for cls in {type(block) for block in blocks.values()}
        }
        # Reaches every block, so that its backward runs even if no parameter needs a gradient.
        self._anchor = torch.zeros((), requires_grad=True)
        for block in blocks.values():
            counterpart = self._copied.of(block)
            vars(counterpart)["forward"] = self._forward(counterpart, run[type(block)])

    @property
    def root(self) -> nn.Module:
        """The copy of the model."""
        return self._copied.root

    def pull(self, outputs: torch.Tensor, gradient: torch.Tensor) -> None:
        """Send the gradient of outputs of `root` back through all blocks."""
        torch.autograd.grad(outputs, self._anchor, gradient)

    def _compiled(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(block: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> Any:
            return forward(block, *args, **kwargs)

        return torch.compile(run, backend=self._traced, fullgraph=True)

    def _traced(self, gm: GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        traced = _Traced.of(gm)

        def run(*args: Any) -> Any:
            results, shapes, ends = traced.outputs(args)
            self._tape.append(_Ran(traced, args, results, shapes, ends))
            return results

        return run

    def _forward(self, block: nn.Module, run: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            flat, structure = pytree.tree_flatten((args, kwargs))
            places = [n for n, each in enumerate(flat) if _needs_gradient(each)]
            call = _Call(self, flat, places, structure, lambda a, k: run(block, a, k))
            own = (flat[n] for n in places)
            found = _RunBlock.apply(call, self._anchor, *own)  # type: ignore[no-untyped-call]
            return call.restored(found)

        return forward


def _needs_gradient(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


@dataclass(eq=False)
class _Call:
    """One call of a block in a batch: what it was given, and what ran."""

    model: TracedModel
    flat: list[Any]
    places: list[int]
    structure: Any
    run: Callable[[Any, Any], Any]
    ran: "_Ran | None" = None
    outputs: list[Any] = field(default_factory=list)
    output_structure: Any = None

    def forward(self) -> tuple[torch.Tensor, ...]:
        """Run the block; return the tensors among its outputs."""
        for place in self.places:
            self.flat[place] = self.flat[place].detach()
        args, kwargs = pytree.tree_unflatten(self.flat, self.structure)
        tape = self.model._tape
        tape.clear()
        outputs = self.run(args, kwargs)
        if len(tape) != 1:
            raise GraphError("a block did not run as one graph")
        self.ran = tape.pop()
        self.outputs, self.output_structure = pytree.tree_flatten(outputs)
        return tuple(each for each in self.outputs if isinstance(each, torch.Tensor))

    def restored(self, tensors: tuple[torch.Tensor, ...]) -> Any:
        """Return the outputs of the block with these tensors in their places."""
        left = iter(tensors)
        flat = [next(left) if isinstance(each, torch.Tensor) else each for each in self.outputs]
        return pytree.tree_unflatten(flat, self.output_structure)

    def backward(self, gradients: Sequence[torch.Tensor | None]) -> Iterator[torch.Tensor]:
        """Send gradients of the outputs back; return those of the inputs that need one."""
        assert self.ran is not None, "the block ran before"
        given = [self.flat[place] for place in self.places]
        tensors = [each for each in self.outputs if isinstance(each, torch.Tensor)]
        pulled = self.ran.pull(given, tensors, gradients, self.model._take)
        self.ran = None  # a batch goes back once
        return iter(pulled)


class _RunBlock(torch.autograd.Function):
    """Runs a block without recording it; its backward runs the traced block once more."""

    @staticmethod
    def forward(ctx: Any, call: _Call, anchor: torch.Tensor, *_: torch.Tensor) -> Any:
        ctx.call = call
        # A tensor that comes out as it went in would be one node with its own gradient.
        return tuple(each.view_as(each) for each in call.forward())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        pulled = ctx.call.backward(gradients)
        return None, torch.zeros(()), *pulled


@dataclass(frozen=True, eq=False)
class _Traced:
    """The graph of a block, with an added input for a change of each product's output.

    It returns what the block does, the shapes of these outputs, and the ends of routed rows.
    """

    gm: GraphModule
    products: tuple[Product, ...]

    @classmethod
    def of(cls, gm: GraphModule) -> "_Traced":
        gm = copy(InlineCalls()(gm).graph_module)
        places = {node: place for place, node in enumerate(inputs_of(gm.graph))}
        products: list[Product] = []
        shapes: list[Node] = []
        ends: list[Node | None] = []
        for node in list(gm.graph.nodes):
            use = weight_use(gm, node)
            if use is None or use.kind not in PRODUCTS or use.weight_node not in places:
                continue
            routing = routing_of(node) if use.kind == "grouped" else None
            with gm.graph.inserting_after(list(inputs_of(gm.graph))[-1]):
                added = gm.graph.placeholder(f"change_{len(products)}")
            with gm.graph.inserting_after(use.output):
                changed = gm.graph.call_function(torch.add, (use.output, added))
            use.output.replace_all_uses_with(changed)
            changed.args = (use.output, added)
            with gm.graph.inserting_after(changed):
                shapes.append(gm.graph.call_function(getattr, (changed, "shape")))
            ends.append(None if routing is None else routing.ends)
            products.append(Product(use.kind, places[use.weight_node]))
        (output,) = gm.graph.find_nodes(op="output")
        output.args = ((output.args[0], tuple(shapes), tuple(ends)),)
        gm.recompile()
        return cls(gm, tuple(products))

    def outputs(self, args: Sequence[Any], changes: Sequence[torch.Tensor] | None = None) -> Any:
        if changes is None:
            changes = [torch.zeros(())] * len(self.products)
        return self.gm(*args, *changes)


@dataclass(frozen=True, eq=False)
class _Ran:
    """A traced block as it ran: what it was called with, and what it returned."""

    traced: _Traced
    args: tuple[Any, ...]
    results: Sequence[Any]
    shapes: Sequence[torch.Size]
    ends: Sequence[torch.Tensor | None]

    def pull(
        self,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor | None],
        take: Gradients,
    ) -> tuple[torch.Tensor, ...]:
        """Send gradients of outputs back, and hand over those of the outputs of products.

        :return: gradients of the inputs
        """
        places = [_place_of(each, self.args, "an input") for each in inputs]
        wanted = [
            (_place_of(own, self.results, "an output"), gradient)
            for own, gradient in zip(outputs, gradients, strict=True)
            if gradient is not None
        ]

        weights = [self.args[product.weight] for product in self.traced.products]
        changes = [
            weight.new_zeros(shape, requires_grad=True)
            for weight, shape in zip(weights, self.shapes, strict=True)
        ]
        args = list(self.args)
        given = [value.detach().requires_grad_() for value in inputs]
        for place, value in zip(places, given, strict=True):
            args[place] = value
        # Not `torch.func.vjp`: custom ops, such as that of experts on a CPU, do not work under it.
        with torch.enable_grad():
            results = self.traced.outputs(args, changes)[0]
        found = torch.autograd.grad(
            [results[place] for place, _ in wanted],
            [*given, *changes],
            [gradient for _, gradient in wanted],
            materialize_grads=True,
        )
        of_inputs, of_changes = found[: len(given)], found[len(given) :]
        for product, weight, gradient, ends in zip(
            self.traced.products, weights, of_changes, self.ends, strict=True
        ):
            take(weight, product.kind, gradient, ends)
        return of_inputs


def _place_of(value: torch.Tensor, among: Sequence[Any], what: str) -> int:
    for place, each in enumerate(among):
        if each is value:
            return place
    raise GraphError(f"{what} of a block is not {what} of its graph")
