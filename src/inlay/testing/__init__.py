"""Laws for everybody's observers and passes, with Hypothesis: `pip install 'inlay[testing]'`."""

try:
    import hypothesis as _hypothesis  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "inlay.testing needs Hypothesis; run: pip install 'inlay[testing]'", name="hypothesis"
    ) from error

from inlay.checking import CheckedCalibration, check_calibration
from inlay.testing.checks import (
    Check,
    check_observer,
    check_pass,
    checks_of,
    parametrize_with_checks,
)
from inlay.testing.graphs import GraphCase, graphs, trace
from inlay.testing.law import Bounds, BrokenLawError, Law
from inlay.testing.modules import GeneratedModule, example_inputs, modules, recipes
from inlay.testing.observer_cases import ObserverSubject
from inlay.testing.pass_laws import PassSubject
from inlay.testing.strategies import (
    batches,
    observables,
    padded_batches,
    quantization_args,
    values,
)

__all__ = [
    "Bounds",
    "BrokenLawError",
    "Check",
    "CheckedCalibration",
    "GeneratedModule",
    "GraphCase",
    "Law",
    "ObserverSubject",
    "PassSubject",
    "batches",
    "check_calibration",
    "check_observer",
    "check_pass",
    "checks_of",
    "example_inputs",
    "graphs",
    "modules",
    "observables",
    "padded_batches",
    "parametrize_with_checks",
    "quantization_args",
    "recipes",
    "trace",
    "values",
]
