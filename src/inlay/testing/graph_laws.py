"""Laws for an observer inside a graph: it gathers there what it gathers by itself."""

import warnings
from dataclasses import replace

import torch
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from hypothesis import strategies as st
from torch import nn

from inlay.calibration import Calibration
from inlay.nodes.observe import Observe
from inlay.recipe import Recipe
from inlay.statistics.rule import Rule
from inlay.statistics.value import Statistics
from inlay.testing.batch_laws import require_equal
from inlay.testing.law import Law, law
from inlay.testing.observer_cases import ObserverCase, ObserverSubject, gathered, tensors_after
from inlay.torch_private import FakeTensorMode

__all__ = ["LAWS", "reason_opaque"]

Subject = ObserverSubject


def reason_opaque(subject: Subject) -> str | None:
    """Why the observer cannot be traced and runs outside compiled graphs; None if it can."""
    for base_name, args in subject.gathering:
        shape = (2, 2, 3, 16) if base_name == "k" else (2, 3, (args.group_size or 1) * 2)
        case = ObserverCase(base_name, args, (torch.ones(shape),))
        with FakeTensorMode() as mode:
            target = Observe.traced(Rule(case.slot), mode.from_tensor(case.values[0]))
        if target.is_opaque:
            return target.reason
    return None


def _gathers_nothing(subject: Subject) -> str | None:
    return None if subject.gathering else "it gathers no statistics while data runs"


def _has_no_linear(subject: Subject) -> str | None:
    if not _of_linear(subject):
        return "it accepts no inputs of Linear"
    return None if subject.compilers else "no compilers are asked for"


def _is_opaque(subject: Subject) -> str | None:
    reason = reason_opaque(subject)
    return _gathers_nothing(subject) if reason is None else f"it is not traced: {reason}"


@law(Subject.several, unless=_gathers_nothing)
def a_graph_gathers_what_the_observer_gathers(subject: Subject, case: ObserverCase) -> None:
    """The functional view, op by op, has the statistics of the class, for first and later values.

    A graph never calls `forward`, only `update_statistics_from_observed`.
    """
    found = gathered(case, case.values)
    expected = tensors_after(case, case.values)
    require_equal(subject, found.tensors, expected, "a graph, op by op", "the observer itself")


@law(Subject.several, unless=_is_opaque)
def first_and_later_values_are_traced_alike(subject: Subject, case: ObserverCase) -> None:
    """What a compiler is given, which takes every value as first and later at once, is the same."""
    rule = Rule(case.slot)
    with FakeTensorMode() as mode:
        specs = rule.specs(mode.from_tensor(case.values[0]))
    statistics = Statistics.start(rule, specs, case.values[0].device)
    tensors = dict(statistics.tensors)
    with torch.no_grad():
        for seen, value in enumerate(case.values):
            tensors = rule.after(tensors, torch.tensor(seen), value)
    expected = tensors_after(case, case.values)
    require_equal(subject, tensors, expected, "a traced graph", "the observer itself")


@law(
    lambda subject: st.builds(
        lambda case, compiler: replace(case, also={"compiler": compiler}),
        subject.several(3, least=2, of=_of_linear(subject)),
        st.sampled_from(subject.compilers),
    ),
    unless=_has_no_linear,
    cost=10,
)
def compiled_equals_eager(subject: Subject, case: ObserverCase) -> None:
    """In a compiled model, over batches of several shapes, it gathers what it gathers by itself."""
    compiler = case.also["compiler"]
    features, dtype = case.values[0].shape[-1], case.values[0].dtype
    model = _Model(features).to(dtype)
    part = "weights" if case.slot.is_importance else "input_activations"
    scheme = QuantizationScheme(targets=["Linear"], **{part: case.args})
    recipe = Recipe(QuantizationConfig(config_groups={"group_0": scheme}))
    calibration = Calibration(model, recipe, compiler=compiler, progress=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "observer .* cannot be traced and runs outside")
        for value in case.values:
            calibration.observe(value)
    (statistics,) = calibration.statistics.snapshot().values()
    expected = tensors_after(case, case.values)
    require_equal(
        subject,
        statistics.tensors,
        expected,
        f'a graph compiled with "{compiler}"',
        "the observer itself",
    )


class _Model(nn.Module):
    """A Linear, and something after it that a compiler could fuse with observers."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.module = nn.Linear(features, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.module(x))


def _of_linear(subject: Subject) -> list[str]:
    """The base names that a Linear has, of those that the observer gathers."""
    return [name for name in ("input", "importance") if name in dict(subject.gathering)]


LAWS: tuple[Law[Subject], ...] = (
    a_graph_gathers_what_the_observer_gathers,
    first_and_later_values_are_traced_alike,
    compiled_equals_eager,
)
