"""What a law is, and how Hypothesis holds something against it.

A law is a function of a subject (an observer, a pass) and a case that Hypothesis draws. Its name is
the name of the check, and its docstring is its specification. It returns if the law holds, and
raises `BrokenLawError` with a sentence that tells the author of the subject what is wrong.
"""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from hypothesis import HealthCheck, Phase, Verbosity, given, settings
from hypothesis import strategies as st
from hypothesis.errors import (
    Flaky,
    HypothesisException,
    Unsatisfiable,
    UnsatisfiedAssumption,
)

from inlay.errors import ConfigurationError

__all__ = ["UNBOUNDED", "Bounds", "BrokenLawError", "Law", "law", "require", "require_holds"]

_S = TypeVar("_S")


class BrokenLawError(AssertionError):
    """A subject breaks a law. The message names the law, the case and the difference."""


@dataclass(frozen=True)
class Law(Generic[_S]):
    """A law for subjects of one kind.

    :param check: raises `BrokenLawError` if a case breaks the law
    :param cases: the cases to draw for a subject
    :param reason_not: why the law does not apply to a subject; None if it does
    :param cost: how many usual examples one example of this law takes as long as
    """

    check: Callable[[_S, Any], None]
    cases: Callable[[_S], st.SearchStrategy[Any]]
    reason_not: Callable[[_S], str | None]
    cost: int = 1

    @property
    def name(self) -> str:
        return self.check.__name__

    @property
    def text(self) -> str:
        """What the law says, in a sentence."""
        return (self.check.__doc__ or self.name).strip().partition("\n")[0]

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Bounds:
    """How long a law is tried.

    :param examples: how many cases; None for as many as the Hypothesis profile says
    :param seconds: how long; a law tries one case all the same
    :param until: when to stop, by `time.monotonic`, where several laws share the seconds
    """

    examples: int | None = None
    seconds: float | None = None
    until: float | None = None

    def from_now(self) -> "Bounds":
        """The same bounds, with the clock running."""
        if self.seconds is None or self.until is not None:
            return self
        return replace(self, until=time.monotonic() + self.seconds)

    @property
    def is_over(self) -> bool:
        return self.until is not None and time.monotonic() > self.until


UNBOUNDED = Bounds()
# Cases to try before a subject counts as refusing all of them.
_REFUSALS = 100


def law(
    cases: Callable[[Any], st.SearchStrategy[Any]],
    *,
    unless: Callable[[Any], str | None] = lambda _: None,
    cost: int = 1,
) -> Callable[[Callable[[_S, Any], None]], Law[_S]]:
    """Make a law of a function.

    :param cases: the cases to draw for a subject
    :param unless: why the law does not apply to a subject; None if it does
    :param cost: how many usual examples one example takes as long as
    """
    return lambda check: Law(check, cases, unless, cost)


def require(holds: object, problem: str) -> None:
    """Raise `BrokenLawError` with a sentence unless something holds."""
    if not holds:
        raise BrokenLawError(problem)


class _RefusesAll(BaseException):
    """Ends a search without a case that is accepted. Hypothesis would shrink an Exception."""


def require_holds(of: Law[_S], subject: _S, bounds: Bounds) -> None:
    """Hold a subject against a law, for cases that Hypothesis draws and shrinks.

    :raises BrokenLawError: for the simplest case found that breaks the law
    :raises ConfigurationError: if the subject refuses all cases
    """
    tried, broken = False, list[str]()
    accepted, refused = False, 0
    bounds = bounds.from_now()

    def holds(case: Any) -> None:
        nonlocal tried, accepted, refused
        # What failed once must fail again, or Hypothesis would call it flaky.
        if tried and not broken and bounds.is_over:
            return
        tried = True
        try:
            of.check(subject, case)
        except (HypothesisException, UnsatisfiedAssumption) as refusal:
            refused += 1
            if not accepted and refused >= _REFUSALS:
                raise _RefusesAll from refusal
            raise
        except Exception as error:
            broken.append(_message(of, subject, case, error))
            raise BrokenLawError(broken[-1]) from error
        accepted = True

    # Hypothesis tells tests, and the examples it remembers of them, apart by name.
    holds.__name__ = holds.__qualname__ = re.sub(r"\W", "_", f"{of.name}_{subject}")
    try:
        given(of.cases(subject))(_with(of.cost, bounds)(holds))()
    except (Unsatisfiable, _RefusesAll) as error:
        raise ConfigurationError(
            f"{subject} refuses every case that was made up for {of.name}; a pass can be given "
            "`graphs` that it takes, and `after`, the passes that have to run before it"
        ) from error
    except Flaky as error:
        if not broken:
            raise
        raise BrokenLawError(
            f"{broken[-1]}\nThe same case does not fail again: something is remembered outside of "
            "what is made anew for each case, such as on a class or in a module"
        ) from error


def _with(cost: int, bounds: Bounds) -> settings:
    """The settings of the user's profile, without its clock: laws are not about time."""
    usual = settings.default
    assert usual is not None
    return settings(
        max_examples=max(1, (bounds.examples or usual.max_examples) // cost),
        deadline=None,
        report_multiple_bugs=False,  # one law, one failure
        # The message has the case, and the rest is about the insides of this module.
        print_blob=False,
        verbosity=Verbosity.quiet if usual.verbosity is Verbosity.normal else usual.verbosity,
        phases=[phase for phase in usual.phases if phase is not Phase.explain],
        # A pass may take few of the graphs that are made up.
        suppress_health_check=[
            *usual.suppress_health_check,
            HealthCheck.too_slow,
            HealthCheck.filter_too_much,
        ],
    )


def _message(of: Law[_S], subject: _S, case: Any, error: Exception) -> str:
    if isinstance(error, BrokenLawError):
        problem = str(error)
    else:
        gist = str(error).strip().partition("\n")[0]
        problem = f"it raises {type(error).__name__}: {gist}"
    return f"{subject} breaks {of.name}: {problem}\nThe law: {of.text}\nTo reproduce:\n{case}"
