"""Hold observers and passes against their laws: in one call, or as one test for each law."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from inlay.observers import Observer
from inlay.testing import batch_laws, graph_laws, observer_laws
from inlay.testing.law import UNBOUNDED, Bounds, Law, require_holds
from inlay.testing.observer_cases import ObserverSubject

__all__ = ["OBSERVER_LAWS", "Check", "check_observer", "checks_of", "parametrize_with_checks"]

OBSERVER_LAWS: tuple[Law[ObserverSubject], ...] = (
    *observer_laws.LAWS,
    *batch_laws.LAWS,
    *graph_laws.LAWS,
)
_COMPILERS = ("eager", "aot_eager")

Subject = ObserverSubject


@dataclass(frozen=True)
class Check:
    """One law for one subject: call it in a test.

    :param reason_not: why the law does not apply to the subject; None if it does
    :param bounds: how many cases to try, and until when
    """

    law: Law[Any]
    subject: Subject
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


def checks_of(subject: "str | type[Observer] | Subject", bounds: Bounds = UNBOUNDED) -> list[Check]:
    """All laws for an observer or a pass, also those that do not apply, with the reason."""
    subject = _subject_of(subject)
    return [Check(law, subject, law.reason_not(subject), bounds) for law in OBSERVER_LAWS]


def check_observer(
    observer: str | type[Observer],
    *,
    observer_kwargs: Mapping[str, Any] | None = None,
    examples: int | None = None,
    seconds: float | None = None,
    compilers: Sequence[str] = _COMPILERS,
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
    subject = Subject.of(observer, observer_kwargs, compilers)
    bounds = Bounds(examples, seconds).from_now()
    for check in checks_of(subject, bounds):
        if check.reason_not is None:
            check()


def parametrize_with_checks(
    subjects: "Iterable[str | type[Observer] | Subject]",
    *,
    examples: int | None = None,
    seconds: float | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a test function with an argument `check` one test for each law that applies.

    :param subjects: observers by name or class; `ObserverSubject.of` gives one with settings
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


def _subject_of(given: "str | type[Observer] | Subject") -> Subject:
    return given if isinstance(given, Subject) else Subject.of(given)
