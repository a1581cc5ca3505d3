"""Laws for everybody's observers and passes, with Hypothesis: `pip install 'inlay[testing]'`."""

try:
    import hypothesis as _hypothesis  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "inlay.testing needs Hypothesis; run: pip install 'inlay[testing]'", name="hypothesis"
    ) from error

from inlay.testing.checks import Check, check_observer, checks_of, parametrize_with_checks
from inlay.testing.law import Bounds, BrokenLawError, Law
from inlay.testing.observer_cases import ObserverSubject

__all__ = [
    "Bounds",
    "BrokenLawError",
    "Check",
    "Law",
    "ObserverSubject",
    "check_observer",
    "checks_of",
    "parametrize_with_checks",
]
