"""The kit catches broken passes: each by the law that speaks of its mistake, in its words."""

import re
from copy import deepcopy
from dataclasses import dataclass

import pytest
import torch
from profiles import count, unshrunk
from torch import nn
from torch.fx import Graph, GraphModule, Node

from inlay.graph import Pass, PassResult, copy, fake_value, made_by, observes, require_nodes, stamp
from inlay.testing import Bounds, BrokenLawError, PassSubject, check_pass, checks_of
from inlay.testing.graphs import trace

pytestmark = pytest.mark.slow


def relus(gm: GraphModule) -> list[Node]:
    named = {"relu", torch.ops.aten.relu.default}
    return [n for n in gm.graph.nodes if n.target in named and n.op.startswith("call")]


def as_clamp(graph: Graph, node: Node) -> Node:
    """Write a relu as a clamp, with the metadata that it had."""
    with graph.inserting_before(node):
        new: Node = graph.call_function(torch.clamp, (node.args[0], 0))
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    graph.erase_node(node)
    return new


@dataclass(frozen=True, kw_only=True)
class Right(Pass):
    """Write relu as clamp.

    Before:                 After:
        x                       x
        y = x.relu()            y = clamp(x, 0)
        return y                return y
    """

    def call(self, gm: GraphModule) -> PassResult:
        gm = copy(gm)
        found = relus(gm)
        for node in found:
            stamp(as_clamp(gm.graph, node), self.name)
        gm.recompile()
        return PassResult(gm, bool(found))


class EditsItsInput(Right):
    def call(self, gm: GraphModule) -> PassResult:
        for node in relus(gm):
            node.meta["seen_by"] = self.name  # on the graph that was given, before it is copied
        return super().call(gm)


class ScalesWeights(Right):
    """Works on a copy of the graph, whose weights are those of the model."""

    def call(self, gm: GraphModule) -> PassResult:
        result = super().call(gm)
        for parameter in result.graph_module.parameters():
            parameter.data.mul_(1.0001)
        return result


class ForgetsModified(Right):
    def call(self, gm: GraphModule) -> PassResult:
        return PassResult(super().call(gm).graph_module, False)


class AlwaysModified(Right):
    def call(self, gm: GraphModule) -> PassResult:
        return PassResult(super().call(gm).graph_module, True)


class NeverDone(Pass):
    """Puts another clamp behind every clamp, each time it runs."""

    def call(self, gm: GraphModule) -> PassResult:
        gm = copy(gm)
        found = [*relus(gm), *(n for n in gm.graph.nodes if n.target is torch.clamp)]
        for node in found:
            with gm.graph.inserting_after(node):
                new = gm.graph.call_function(torch.clamp, (node, 0))
            node.replace_all_uses_with(new, delete_user_cb=lambda user, new=new: user is not new)
            new.meta = dict(node.meta)
            stamp(new, self.name)
        gm.recompile()
        return PassResult(gm, bool(found))


class ForgetsToRecompile(Pass):
    """Runs the code of the graph as it was; a `copy` that nobody ran has none yet."""

    def call(self, gm: GraphModule) -> PassResult:
        gm = GraphModule(gm, deepcopy(gm.graph))
        found = relus(gm)
        for node in found:
            stamp(as_clamp(gm.graph, node), self.name)
        return PassResult(gm, bool(found))


class Unstamped(Pass):
    def call(self, gm: GraphModule) -> PassResult:
        gm = copy(gm)
        found = relus(gm)
        for node in found:
            as_clamp(gm.graph, node)
        gm.recompile()
        return PassResult(gm, bool(found))


class DropsMetadata(Right):
    def call(self, gm: GraphModule) -> PassResult:
        result = super().call(gm)
        for node in result.graph_module.graph.nodes:
            if node.target is torch.clamp:
                made = dict(node.meta)
                node.meta.clear()
                node.meta.update({k: v for k, v in made.items() if k.startswith("inlay_")})
        return result


class StaleShapes(Right):
    """Leaves on the new node the fake value of what it reads, in another dtype."""

    def call(self, gm: GraphModule) -> PassResult:
        result = super().call(gm)
        for node in result.graph_module.graph.nodes:
            if node.target is torch.clamp:
                key = "val" if "val" in node.meta else "example_value"
                node.meta[key] = fake_value(node).double()
        return result


class ClampsAtOne(Right):
    def call(self, gm: GraphModule) -> PassResult:
        result = super().call(gm)
        for node in result.graph_module.graph.nodes:
            if node.target is torch.clamp:
                node.args = (*node.args, 1)  # relu1 is not relu
        result.graph_module.recompile()
        return result


class CopiesWeights(Right):
    """Gives the graph weights of its own, which nobody knows by identity."""

    def call(self, gm: GraphModule) -> PassResult:
        gm = copy(gm)
        modified = False
        for name, parameter in list(gm.named_parameters()):
            owner, _, own = name.rpartition(".")
            module = gm.get_submodule(owner)
            if not hasattr(module, "own_weights"):
                module = _replaced(gm, owner)
                modified = True
            if parameter is getattr(module, own):
                setattr(module, own, nn.Parameter(parameter.clone(), requires_grad=False))
        return PassResult(gm, modified)


class DropsUnread(Right):
    """Drops what nobody reads, on a graph that observes: observers return nothing."""

    def call(self, gm: GraphModule) -> PassResult:
        gm = copy(gm)
        unread = [node for node in gm.graph.nodes if node.op.startswith("call") and not node.users]
        for node in reversed(unread):
            gm.graph.erase_node(node)
        gm.recompile()
        return PassResult(gm, bool(unread))


class ClampsBehindTheObserver(Right):
    """Keeps the function: what is quantized is what was observed, until it is clamped before."""

    def call(self, gm: GraphModule) -> PassResult:
        gm = copy(gm)
        found = [node for node in gm.graph.nodes if observes(node) and node.args[1:]]
        found = [node for node in found if node.args[0].target is not torch.clamp]
        for node in found:
            with gm.graph.inserting_before(node):
                half = gm.graph.call_function(torch.clamp, (node.args[0], -0.5, 0.5))
            half.meta["example_value"] = fake_value(node.args[0])
            stamp(half, self.name)
            node.update_arg(0, half)
        gm.recompile()
        return PassResult(gm, bool(found))


class CutsTheGraph(Right):
    """Leave a call that standard passes take for an outlined body and refuse."""

    def requires(self, gm: GraphModule) -> None:
        require_nodes((n for n in gm.graph.nodes if made_by(n)), "other passes made these")
        require_nodes(() if _returned(gm) else gm.graph.nodes, "nothing is returned by these")

    def call(self, gm: GraphModule) -> PassResult:
        gm = copy(gm)
        if hasattr(gm, "outlined_0"):
            return PassResult(gm, False)
        gm.outlined_0 = nn.Identity()
        (output,) = gm.graph.find_nodes(op="output")
        read = _returned(gm)[0]
        with gm.graph.inserting_before(output):
            node = gm.graph.call_module("outlined_0", (read,))
        node.meta = dict(read.meta)
        output.replace_input_with(read, stamp(node, self.name))
        gm.recompile()
        return PassResult(gm, True)


def _returned(gm: GraphModule) -> list[Node]:
    (output,) = gm.graph.find_nodes(op="output")
    return output.all_input_nodes


class MixesUpOperands(Right):
    """Show the right ops, reading another value.

    Before:                 After:
        x, z                    x, z
        y = x.relu()            y = clamp(z, 0)
        v = y.add(z)            v = y.add(z)
        return v                return v
    """


class LyingDocstring(Right):
    """Write relu as clamp.

    Before:                 After:
        x                       x
        y = x.relu()            y = maximum(x, 0)
        return y                return y
    """


def _replaced(gm: GraphModule, name: str) -> nn.Module:
    """A shallow copy of a module in place of it, so that the model's own is left alone."""
    old = gm.get_submodule(name)
    new = old.__new__(type(old))
    new.__dict__ = {**old.__dict__, "_parameters": dict(old._parameters), "own_weights": True}
    parent, _, own = name.rpartition(".")
    setattr(gm.get_submodule(parent), own, new)
    return new


class ReluOfLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4).requires_grad_(False)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[0](x.relu())


def relu_of_linear() -> tuple[GraphModule, tuple[torch.Tensor]]:
    """A graph with what the passes here look for, which generated ones may not have."""
    x = torch.linspace(-2, 2, 8).reshape(2, 4)
    return trace("symbolic_trace", ReluOfLinear(), x), (x,)


ALONE, HONEST = "the_input_is_left_alone", "modified_is_honest"
AGAIN, SOUND = "a_second_run_changes_nothing", "the_graph_is_sound"
META, OUTPUTS = "metadata_stays_true", "outputs_stay"
COMPOSES, SHOWN = "it_composes_with_the_standard_pipelines", "the_docstring_is_what_it_does"

# The law that speaks of the mistake, what its message says, and other laws that may break with it.
MISTAKES: list[tuple[type[Pass], str, str, set[str]]] = [
    (EditsItsInput, ALONE, "changes the graph that it was given: the metadata seen_by", set()),
    (ScalesWeights, ALONE, "the values of .* differ", {HONEST, AGAIN, OUTPUTS}),
    (ForgetsModified, HONEST, "says that it modified nothing, and node", set()),
    (AlwaysModified, HONEST, "says that it modified the graph, and nothing differs", {AGAIN}),
    (NeverDone, AGAIN, "a second run changes the graph again", {SOUND}),
    (ForgetsToRecompile, SOUND, "call recompile", {OUTPUTS}),
    (Unstamped, SOUND, "do not say which pass made them: clamp", set()),
    (DropsMetadata, META, "has no fake value", {COMPOSES}),
    (StaleShapes, META, "the fake value of node clamp.* is torch.float64", set()),
    (ClampsAtOne, OUTPUTS, "output 0 changes by more than 0", {SHOWN, AGAIN, COMPOSES}),
    (CopiesWeights, COMPOSES, "no longer observe .*layers", {ALONE, HONEST, AGAIN, META, SHOWN}),
    (
        DropsUnread,
        COMPOSES,
        "before ShareObservers .* no longer observe .*input",
        {
            SHOWN,
            AGAIN,
            OUTPUTS,
            META,
        },
    ),
    (ClampsBehindTheObserver, COMPOSES, "max_vals of .*input is .* and .* without it", {SHOWN}),
    (CutsTheGraph, COMPOSES, "fits nowhere .*Annotate refuses what it makes", {SHOWN}),
    (LyingDocstring, SHOWN, "after the pass, the docstring shows maximum, and the graph", set()),
    (MixesUpOperands, SHOWN, "clamp reads z in the docstring, and x in the graph", set()),
]


def broken_by(cls: type[Pass], bounds: Bounds, laws: set[str] | None = None) -> dict[str, str]:
    """The laws that a pass breaks, with their messages."""
    found = {}
    for check in checks_of(PassSubject(cls(), given=(relu_of_linear(),)), bounds):
        if check.reason_not is None and (laws is None or check.law.name in laws):
            try:
                check()
            except BrokenLawError as error:
                found[check.law.name] = str(error)
    return found


@pytest.mark.parametrize(
    ("cls", "law", "message", "others"), MISTAKES, ids=[m[0].__name__ for m in MISTAKES]
)
def test_each_mistake_is_caught_by_the_law_that_speaks_of_it(
    cls: type[Pass], law: str, message: str, others: set[str]
) -> None:
    with unshrunk():
        found = broken_by(cls, Bounds(count(12)))
        assert re.search(message, found.get(law, "")), found or "nothing is found"
        assert set(found) <= {law, *others}


def test_what_is_right_breaks_nothing() -> None:
    check_pass(Right(), examples=8)


def test_every_law_catches_something() -> None:
    assert {law for _, law, _, _ in MISTAKES} == {c.law.name for c in checks_of(Right())}
    assert all(check.reason_not is None for check in checks_of(Right()))


def test_given_graphs_are_tried_too() -> None:
    """What generated graphs do not have, such as a relu of a relu."""
    x = torch.linspace(-1, 2, 6)

    class Twice(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.relu().relu()

    gm = trace("symbolic_trace", Twice(), x)
    with unshrunk(), pytest.raises(BrokenLawError, match="the given graph"):
        check_pass(OneAtATime(), graphs=[(gm, (x,))], examples=40)


class OneAtATime(Right):
    """Rewrites the first relu of two in a row only."""

    def call(self, gm: GraphModule) -> PassResult:
        gm = copy(gm)
        found = relus(gm)
        done = [node for node in found if node.args[0] not in found]
        for node in done:
            stamp(as_clamp(gm.graph, node), self.name)
        gm.recompile()
        return PassResult(gm, bool(done))


def test_a_law_that_does_not_apply_says_why() -> None:
    class Changing(Right):
        keeps_function = False

    reasons = {check.law.name: check.text for check in checks_of(PassSubject(Changing()))}
    assert reasons[OUTPUTS] == "does not apply: it says that it changes what the graph computes"
    assert reasons[HONEST].startswith("`modified` is true if")
