"""Laws for passes: what a function from graph to graph leaves alone, promises and says."""

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from typing import Any

import torch
from hypothesis import reject
from hypothesis import strategies as st
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.node import map_arg

from inlay.errors import GraphError
from inlay.graph import Pass, PassResult, Pipeline, fake_value, made_by, observes
from inlay.graph.editing import leaves
from inlay.passes import PREPARE, OutlineRepeats, PruneUnobserved
from inlay.testing.docstrings import Documented, difference, documented
from inlay.testing.graphs import GraphCase, graphs, inputs_for
from inlay.testing.law import BrokenLawError, Law, law, require

__all__ = ["LAWS", "PassSubject"]

_COST = 4  # of tracing a model, which takes most of the time


@dataclass(frozen=True, eq=False)
class PassSubject:
    """A pass under test.

    :param step: the pass, or its class, whose fields `plan` and `qparams` are then filled in
    :param after: passes that have to run before it
    :param given: graphs to try besides generated ones, each with what it is called with
    :param tolerance: how far outputs may move if the pass says that it keeps the function
    :param example: the graph that the docstring shows before the pass
    """

    step: Pass | type[Pass]
    after: tuple[Pass | type[Pass], ...] = ()
    given: tuple[tuple[GraphModule, tuple[Any, ...]], ...] = ()
    tolerance: float = 0.0
    example: GraphModule | None = None

    def __str__(self) -> str:
        return self.cls.__name__

    @property
    def cls(self) -> type[Pass]:
        return self.step if isinstance(self.step, type) else type(self.step)

    @property
    def documented(self) -> Documented | None:
        return documented(self.cls)

    def cases(self) -> st.SearchStrategy[GraphCase]:
        """Graphs of generated models, and those that were given."""
        own = [GraphCase(gm, None, inputs) for gm, inputs in self.given]
        return st.one_of(st.sampled_from(own), graphs()) if own else graphs()

    def pass_for(self, case: GraphCase) -> Pass:
        return _instance(self.step, case)

    def before(self, case: GraphCase) -> GraphModule:
        """The graph that the pass is given, after those that have to run before it."""
        gm = case.graph_module
        for step in self.after:
            gm = _instance(step, case)(gm).graph_module
        return gm

    def run(self, case: GraphCase, gm: GraphModule) -> PassResult:
        """Run the pass, or skip the case if it refuses the graph."""
        step = self.pass_for(case)
        try:
            step.requires(gm)
        except GraphError:
            reject()
        result = step.call(gm)
        require(
            isinstance(result, PassResult) and isinstance(result.graph_module, GraphModule),
            f"it returns {result!r}, and not a PassResult with a GraphModule",
        )
        return result


def _instance(step: Pass | type[Pass], case: GraphCase) -> Pass:
    if isinstance(step, Pass):
        return step
    return Pipeline.of([step], **case.configuration).passes[0]


@law(PassSubject.cases, cost=_COST)
def the_input_is_left_alone(subject: PassSubject, case: GraphCase) -> None:
    """The graph that a pass is given is afterwards what it was: nodes, metadata, weights, code."""
    gm = subject.before(case)
    before = _Snapshot(gm)
    result = subject.run(case, gm)
    require(
        result.graph_module is not gm,
        "it returns the graph that it was given; work on inlay.graph.copy(gm)",
    )
    require(
        not (difference := before.difference(_Snapshot(gm))),
        f"it changes the graph that it was given: {difference}; work on inlay.graph.copy(gm)",
    )


@law(PassSubject.cases, cost=_COST)
def modified_is_honest(subject: PassSubject, case: GraphCase) -> None:
    """`modified` is true if the graph differs from the one that was given, and only then."""
    gm = subject.before(case)
    before = _Snapshot(gm)
    result = subject.run(case, gm)
    difference = before.difference(_Snapshot(result.graph_module))
    if result.modified:
        require(difference, "it says that it modified the graph, and nothing differs")
    else:
        require(not difference, f"it says that it modified nothing, and {difference}")


@law(PassSubject.cases, cost=_COST)
def a_second_run_changes_nothing(subject: PassSubject, case: GraphCase) -> None:
    """Run on its own result, a pass changes nothing and says so."""
    once = subject.run(case, subject.before(case)).graph_module
    before = _Snapshot(once)
    try:
        again = subject.run(case, once)
    except GraphError:
        return  # it refuses its own result, and does not change it silently
    difference = before.difference(_Snapshot(again.graph_module))
    require(not difference, f"a second run changes the graph again: {difference}")
    require(not again.modified, "a second run says that it modified the graph, and did not")


@law(PassSubject.cases, cost=_COST)
def the_graph_is_sound(subject: PassSubject, case: GraphCase) -> None:
    """The result passes `lint` and its code is that of its graph; new nodes say who made them."""
    gm = subject.before(case)
    there = {node.name for node in gm.graph.nodes}
    result = subject.run(case, gm).graph_module
    try:
        result.graph.lint()
    except Exception as error:
        raise BrokenLawError(f"the graph does not pass lint: {error}") from error
    require(
        result.code == result.graph.python_code("self").src,
        "the code of the module is not that of its graph; call recompile()",
    )
    unstamped = [
        node.name for node in result.graph.nodes if node.name not in there and not made_by(node)
    ]
    require(
        not unstamped,
        f"new nodes do not say which pass made them: {', '.join(unstamped)}; use "
        "inlay.graph.stamp(node, self.name)",
    )


@law(PassSubject.cases, cost=_COST)
def metadata_stays_true(subject: PassSubject, case: GraphCase) -> None:
    """Nodes keep their metadata, and the fake value of a node has the shape of its real value."""
    gm = subject.before(case)
    known = {node.name: set(node.meta) for node in gm.graph.nodes}
    result = subject.run(case, gm).graph_module
    for node in result.graph.nodes:
        lost = known.get(node.name, set()) - set(node.meta)
        require(
            not lost, f"node {node.name} loses its metadata {', '.join(sorted(map(str, lost)))}"
        )
    for node, value in _run(result, case)[1]:
        fake = fake_value(node)
        if node.op == "get_attr" or not isinstance(value, torch.Tensor):
            continue
        require(
            isinstance(fake, torch.Tensor),
            f"node {node.name} has no fake value; set meta['example_value'], as later passes ask "
            "for shapes",
        )
        found, wanted = (tuple(fake.shape), fake.dtype), (tuple(value.shape), value.dtype)
        require(
            found == wanted,
            f"the fake value of node {node.name} is {found[1]} {found[0]}, and its value is "
            f"{wanted[1]} {wanted[0]}",
        )


@law(
    PassSubject.cases,
    cost=_COST,
    unless=lambda subject: (
        None if subject.cls.keeps_function else "it says that it changes what the graph computes"
    ),
)
def outputs_stay(subject: PassSubject, case: GraphCase) -> None:
    """The graph computes what it computed before, as closely as the tolerance says."""
    gm = subject.before(case)
    result = subject.run(case, gm).graph_module
    expected, found = (_run(each, case)[0] for each in (gm, result))
    require(
        len(found) == len(expected), f"it returns {len(found)} values, and {len(expected)} before"
    )
    for place, (one, other) in enumerate(zip(found, expected, strict=True)):
        if isinstance(other, torch.Tensor):
            close = isinstance(one, torch.Tensor) and one.shape == other.shape
            close = close and _is_close(one, other, subject.tolerance)
            require(
                close,
                f"output {place} changes by more than {subject.tolerance:g}; say keeps_function = "
                "False on the class if that is meant",
            )


@law(
    lambda subject: graphs(),
    cost=_COST,
    unless=lambda subject: (
        "it runs after other passes" if subject.after
        else None if subject.cls.keeps_function
        else "it says that it changes what the graph computes"
    ),
)  # fmt: skip
def the_same_slots_are_observed_after_it(subject: PassSubject, case: GraphCase) -> None:
    """The standard passes find the same slots in the result as in the graph that was given."""
    gm = subject.before(case)
    result = subject.run(case, gm).graph_module
    expected = _slots(gm, case)
    try:
        found = _slots(result, case)
    except GraphError:
        return  # the standard passes refuse the result, with a reason
    require(
        found == expected,
        f"the standard passes no longer observe {', '.join(sorted(expected - found)) or 'the same'}"
        f"{_more(found - expected)}; slots are found by the identity of weights and by names of "
        "modules in node.meta",
    )


def _shows_nothing(subject: PassSubject) -> str | None:
    """Why its docstring cannot be held against what it does."""
    if subject.documented is None:
        return "its docstring shows no graph before and after"
    if isinstance(subject.step, type) and any(_is_required(field) for field in fields(subject.cls)):
        return "its fields are unknown; give an instance"
    if subject.example is None and (subject.after or subject.documented.graph() is None):
        return "the graph in its docstring cannot be traced; give it as `example`"
    return None


@law(lambda subject: st.just("    the graph in its docstring"), unless=_shows_nothing)
def the_docstring_is_what_it_does(subject: PassSubject, case: str) -> None:
    """The graph that its docstring shows before the pass becomes the one that it shows after."""
    shown = subject.documented
    assert shown is not None
    gm = subject.example if subject.example is not None else shown.graph()
    assert gm is not None
    _require_shown(shown.lines_before, gm, "before the pass")
    step = subject.step if isinstance(subject.step, Pass) else subject.step()
    _require_shown(shown.lines_after, step(gm).graph_module, "after the pass")


def _require_shown(lines: Sequence[str], gm: GraphModule, when: str) -> None:
    differs = difference(lines, gm)
    require(differs is None, f"{when}, {differs}")


def _is_required(field: Field[Any]) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def _more(slots: set[str]) -> str:
    return f", and now {', '.join(sorted(slots))}" if slots else ""


def _slots(gm: GraphModule, case: GraphCase) -> set[str]:
    standard = [step for step in PREPARE if step not in (PruneUnobserved, OutlineRepeats)]
    observed = Pipeline.of(standard, **case.configuration)(gm).graph_module
    return {slot.name for node in observed.graph.nodes for slot in observes(node)}


class _Recorder(Interpreter):
    """Runs a graph, whatever it takes and returns, and keeps the values that its nodes read."""

    def __init__(self, gm: GraphModule) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.values: list[tuple[Node, Any]] = []

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        if n.users:
            self.values.append((n, value))
        return value


def _run(gm: GraphModule, case: GraphCase) -> tuple[list[Any], list[tuple[Node, Any]]]:
    """The outputs of a graph, and every node that others read with its value."""
    inputs = inputs_for(gm, *case.inputs)
    recorder = _Recorder(gm)
    with torch.no_grad():
        results = recorder.run(
            *(value.clone() if isinstance(value, torch.Tensor) else value for value in inputs),
            enable_io_processing=False,
        )
    return list(leaves(results)), recorder.values


def _is_close(one: torch.Tensor, other: torch.Tensor, tolerance: float) -> bool:
    if tolerance == 0 or not other.is_floating_point():
        return torch.equal(one, other)
    return torch.allclose(one, other, tolerance, tolerance, equal_nan=True)


class _Snapshot:
    """What a graph module is at a time: its nodes, their metadata, its tensors and its code."""

    def __init__(self, gm: GraphModule) -> None:
        self.nodes = {node.name: _described(node) for node in gm.graph.nodes}
        self.order = [node.name for node in gm.graph.nodes]
        self.meta = {node.name: _meta(node.meta) for node in gm.graph.nodes}
        self.tensors = {
            name: tensor.detach().clone()
            for name, tensor in [*gm.named_parameters(), *gm.named_buffers()]
        }

    def difference(self, other: "_Snapshot") -> str:
        """What differs, in a few words; nothing if nothing does."""
        for name in self.nodes.keys() - other.nodes.keys():
            return f"node {name} is gone"
        for name in other.nodes.keys() - self.nodes.keys():
            return f"node {name} is new"
        if self.order != other.order:
            return "nodes stand in another order"
        for name, described in self.nodes.items():
            if not _same(described, other.nodes[name]):
                return f"node {name} differs"
        for name, meta in self.meta.items():
            changed = [key for key in meta.keys() | other.meta[name].keys()
                       if not _same(meta.get(key), other.meta[name].get(key))]  # fmt: skip
            if changed:
                return f"the metadata {', '.join(sorted(map(str, changed)))} of {name} differs"
        for name, tensor in self.tensors.items():
            if name in other.tensors and not torch.equal(tensor, other.tensors[name]):
                return f"the values of {name} differ"
        return ""


def _described(node: Node) -> tuple[Any, ...]:
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: f"%{n.name}")
    return node.op, node.target, args, dict(kwargs)


def _meta(meta: Mapping[Any, Any]) -> dict[Any, Any]:
    """Metadata with its containers copied, so that a change in place shows."""
    return {
        key: value.copy() if isinstance(value, (dict, list, set)) else value
        for key, value in meta.items()
    }


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, torch.Tensor):
        return False  # another tensor
    return bool(one == other)


LAWS: tuple[Law[PassSubject], ...] = (
    the_input_is_left_alone,
    modified_is_honest,
    a_second_run_changes_nothing,
    the_graph_is_sound,
    metadata_stays_true,
    outputs_stay,
    the_same_slots_are_observed_after_it,
    the_docstring_is_what_it_does,
)
