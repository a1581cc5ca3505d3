"""Laws for passes: inputs stay unchanged, promises hold, and results are reported honestly."""

from collections.abc import Sequence
from dataclasses import MISSING, Field, dataclass, fields
from typing import Any

import torch
from hypothesis import reject
from hypothesis import strategies as st
from torch.fx import GraphModule, Interpreter, Node

from inlay.errors import GraphError
from inlay.graph import Pass, PassResult, Pipeline, fake_value, made_by
from inlay.graph.editing import leaves
from inlay.recipe import Recipe
from inlay.testing.composing import STANDARD, Outcome, Place, places_of, standards
from inlay.testing.docstrings import Documented, difference, documented
from inlay.testing.graphs import STATIC, GraphCase, Snapshot, graphs
from inlay.testing.law import BrokenLawError, Law, law, require
from inlay.testing.observer_cases import short

__all__ = ["LAWS", "PassSubject"]

_COST = 4  # of tracing a model, which takes most of the time
_BY_ITSELF = "it refuses the graph itself"


@dataclass(frozen=True, eq=False)
class PassSubject:
    """A pass under test.

    :param step: the pass, or its class, whose fields `plan` and `qparams` are then filled in
    :param after: passes that have to run before it
    :param given: graphs to try besides generated ones, each with what it is called with
    :param tolerance: how far outputs may move if the pass says that it keeps the function
    :param example: the graph that the docstring shows before the pass
    :param recipe: how generated models are to be quantized, for a pass with a plan
    """

    step: Pass | type[Pass]
    after: tuple[Pass | type[Pass], ...] = ()
    given: tuple[tuple[GraphModule, tuple[Any, ...]], ...] = ()
    tolerance: float = 0.0
    example: GraphModule | None = None
    recipe: Recipe = STATIC

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
        own = [GraphCase(gm, None, inputs, self.recipe) for gm, inputs in self.given]
        generated = graphs(recipe=self.recipe)
        return st.one_of(st.sampled_from(own), generated) if own else generated

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
    before = Snapshot(gm)
    result = subject.run(case, gm)
    require(
        result.graph_module is not gm,
        "it returns the graph that it was given; work on inlay.graph.copy(gm)",
    )
    require(
        not (difference := before.difference(Snapshot(gm))),
        f"it changes the graph that it was given: {difference}; work on inlay.graph.copy(gm)",
    )


@law(PassSubject.cases, cost=_COST)
def modified_is_honest(subject: PassSubject, case: GraphCase) -> None:
    """`modified` is true if the graph differs from the one that was given, and only then."""
    gm = subject.before(case)
    before = Snapshot(gm)
    result = subject.run(case, gm)
    difference = before.difference(Snapshot(result.graph_module))
    if result.modified:
        require(difference, "it says that it modified the graph, and nothing differs")
    else:
        require(not difference, f"it says that it modified nothing, and {difference}")


@law(PassSubject.cases, cost=_COST)
def a_second_run_changes_nothing(subject: PassSubject, case: GraphCase) -> None:
    """Run on its own result, a pass changes nothing and says so."""
    once = subject.run(case, subject.before(case)).graph_module
    before = Snapshot(once)
    try:
        subject.pass_for(case).requires(once)
    except GraphError:
        return  # it refuses its own result, and does not change it silently
    again = subject.run(case, once)
    difference = before.difference(Snapshot(again.graph_module))
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


@law(PassSubject.cases, cost=_COST * 3)
def it_composes_with_the_standard_pipelines(subject: PassSubject, case: GraphCase) -> None:
    """Wherever it fits in the standard pipelines, they observe and quantize as without it.

    It fits where it accepts the graph by `requires`, behind the passes that have to run before it,
    and the standard passes that follow accept what it made of the graph by theirs.
    """
    if not case.configuration:
        return  # a recipe has nothing to say of this graph
    places = [
        place
        for standard in standards(case)
        for place in places_of(standard, subject.cls, subject.after)
    ]
    if not places:
        return  # it is no part of the pipelines that make a whole graph
    results = [_composes(subject, case, place) for place in places]
    refusals = [refusal for refusal in results if refusal]
    if all(refusal == _BY_ITSELF for refusal in results):
        reject()  # it is not meant for this graph
    require(
        len(refusals) < len(results),
        "it fits nowhere in the standard pipelines, so no calibration can use it: "
        f"{'; '.join(each for each in refusals if each != _BY_ITSELF)}. If it has to run after "
        "others, let `requires` refuse graphs before them, or name them as `after`",
    )


def _composes(subject: PassSubject, case: GraphCase, place: Place) -> str | None:
    """Put the pass into a pipeline. Return why it does not fit there; None if it does."""
    gm = Pipeline(place.before)(case.graph_module).graph_module
    before_it = (_instance(step, case) for step in subject.after)
    modified = False
    for step in (*(s for s in before_it if type(s) not in STANDARD), subject.pass_for(case)):
        try:
            step.requires(gm)
        except GraphError:
            return _BY_ITSELF
        result = step(gm)
        gm, modified = result.graph_module, modified or result.modified
    if not modified:
        return None  # it leaves the graph to the others as it was
    for step in place.after:
        try:
            step.requires(gm)
        except GraphError as error:
            return f"{step.name} refuses what it makes of a graph if it stands {place} ({error})"
        try:
            gm = step(gm).graph_module
        except Exception as error:
            raise BrokenLawError(f"if it stands {place}, {step.name} fails: {error}") from error
    expected = Outcome.of(Pipeline(place.standard.passes)(case.graph_module).graph_module, case)
    _require_same_outcome(subject, Outcome.of(gm, case), expected, place)
    return None


def _require_same_outcome(
    subject: PassSubject, found: Outcome, expected: Outcome, place: Place
) -> None:
    lost = expected.statistics.keys() - found.statistics.keys()
    new = found.statistics.keys() - expected.statistics.keys()
    require(
        not lost and not new,
        f"if it stands {place}, the standard passes no longer observe "
        f"{', '.join(sorted(lost)) or 'the same'}{_more(new)}; slots are found by the identity of "
        "weights and by names of modules in node.meta, and observers return nothing that is read",
    )
    if not subject.cls.keeps_function:
        return
    for slot, tensors in expected.statistics.items():
        for name, tensor in tensors.items():
            require(
                _is_close(found.statistics[slot][name], tensor, subject.tolerance),
                f"if it stands {place}, {name} of {slot} is {short(found.statistics[slot][name])}, "
                f"and {short(tensor)} without it; what is observed has to be what the op reads",
            )
    pairs = zip(found.outputs, expected.outputs, strict=True)
    for number, (one, other) in enumerate(pairs):
        require(
            not isinstance(other, torch.Tensor) or _is_close(one, other, subject.tolerance),
            f"if it stands {place}, output {number} changes by more than {subject.tolerance:g}",
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
    inputs = case.inputs_of(gm).values()
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


LAWS: tuple[Law[PassSubject], ...] = (
    the_input_is_left_alone,
    modified_is_honest,
    a_second_run_changes_nothing,
    the_graph_is_sound,
    metadata_stays_true,
    outputs_stay,
    it_composes_with_the_standard_pipelines,
    the_docstring_is_what_it_does,
)
