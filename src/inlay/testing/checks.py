"""Hold observers and passes against their laws: in one call, or as one test for each law."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule

from inlay.graph import Pass
from inlay.observers import Observer
from inlay.testing import batch_laws, graph_laws, observer_laws, pass_laws
from inlay.testing.law import UNBOUNDED, Bounds, Law, require_holds
from inlay.testing.observer_cases import ObserverSubject
from inlay.testing.pass_laws import PassSubject

__all__ = [
    "OBSERVER_LAWS",
    "PASS_LAWS",
    "Check",
    "Checkable",
    "check_observer",
    "check_pass",
    "checks_of",
    "parametrize_with_checks",
]

OBSERVER_LAWS: tuple[Law[ObserverSubject], ...] = (
    *observer_laws.LAWS,
    *batch_laws.LAWS,
    *graph_laws.LAWS,
)
PASS_LAWS: tuple[Law[PassSubject], ...] = pass_laws.LAWS

# What can be checked: an observer by name or class, a pass or its class, or either with settings.
Checkable = str | type[Observer] | Pass | type[Pass] | ObserverSubject | PassSubject


@dataclass(frozen=True)
class Check:
    """One law for one subject: call it in a test.

    :param reason_not: why the law does not apply to the subject; None if it does
    :param bounds: how many cases to try, and for how long
    """

    law: Law[Any]
    subject: ObserverSubject | PassSubject
    reason_not: str | None = None
    bounds: Bounds = UNBOUNDED

    def __call__(self) -> None:
        require_holds(self.law, self.subject, self.bounds)

    def __str__(self) -> str:
        return f"{self.subject}-{self.law.name}"

    @property
    def text(self) -> str:
        """What the law says, or why it does not apply."""
        return self.law.text if self.reason_not is None else f"does not apply: {self.reason_not}"


def checks_of(subject: Checkable, bounds: Bounds = UNBOUNDED) -> list[Check]:
    """All laws for an observer or a pass, also those that do not apply, with the reason."""
    of = _subject_of(subject)
    laws: Sequence[Law[Any]] = PASS_LAWS if isinstance(of, PassSubject) else OBSERVER_LAWS
    return [Check(law, of, law.reason_not(of), bounds) for law in laws]


def check_observer(
    observer: str | type[Observer],
    *,
    observer_kwargs: Mapping[str, Any] | None = None,
    examples: int | None = None,
    seconds: float | None = None,
    compilers: Sequence[str] = ("eager", "aot_eager"),
) -> None:
    """Hold an observer against all laws that apply to it.

    :param observer: its class or its name; it must be registered
    :param observer_kwargs: its settings
    :param examples: how many cases to try for a law, fewer where these take longer; by default as
        many as the Hypothesis profile says
    :param seconds: after how long to stop; every law tries at least one case
    :param compilers: backends of `torch.compile` that it has to work with; name "inductor", too, to
        try it
    :raises BrokenLawError: for the first law that it breaks, with the simplest case found
    """
    _check(ObserverSubject.of(observer, observer_kwargs, compilers), Bounds(examples, seconds))


def check_pass(
    step: Pass | type[Pass],
    *,
    graphs: Sequence[tuple[GraphModule, tuple[Any, ...]]] = (),
    after: Sequence[Pass | type[Pass]] = (),
    tolerance: float = 0.0,
    example: GraphModule | None = None,
    examples: int | None = None,
    seconds: float | None = None,
) -> None:
    """Hold a pass against all laws that apply to it, on generated graphs and on these.

    :param step: the pass; or its class, if its fields are `plan` and `qparams`, which are then
        those of the generated models
    :param graphs: further graphs to try, each with its arguments
    :param after: passes that have to run before it
    :param tolerance: how far outputs may move, unless the class says `keeps_function = False`
    :param example: the graph that the docstring shows before the pass, if that is not Python
    :param examples: as for `check_observer`
    :param seconds: as for `check_observer`
    :raises BrokenLawError: for the first law that it breaks, with the simplest graph found
    """
    subject = PassSubject(step, tuple(after), tuple(graphs), tolerance, example)
    _check(subject, Bounds(examples, seconds))


def _check(subject: ObserverSubject | PassSubject, bounds: Bounds) -> None:
    for check in checks_of(subject, bounds.from_now()):
        if check.reason_not is None:
            check()


def parametrize_with_checks(
    subjects: Iterable[Checkable],
    *,
    examples: int | None = None,
    seconds: float | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a test function with an argument `check` one test for each law that applies.

    :param subjects: observers by name or class, passes, or an `ObserverSubject` or `PassSubject`
        for one with settings
    :param examples: as for `check_observer`
    :param seconds: as for `check_observer`, and of each test
    """
    import pytest

    checks = [
        check
        for subject in subjects
        for check in checks_of(subject, Bounds(examples, seconds))
        if check.reason_not is None
    ]
    return pytest.mark.parametrize("check", checks, ids=str)


def _subject_of(given: Checkable) -> ObserverSubject | PassSubject:
    if isinstance(given, (ObserverSubject, PassSubject)):
        return given
    if isinstance(given, Pass):
        return PassSubject(given)
    if isinstance(given, type) and issubclass(given, Pass):
        return PassSubject(given)
    return ObserverSubject.of(given)
