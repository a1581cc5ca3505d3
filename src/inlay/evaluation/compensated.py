"""What compensation gained, for the report."""

import math
from collections.abc import Iterable, Iterator, Mapping

from inlay.report.data import CompensatedWeight
from inlay.steps.weights import Compensation

__all__ = ["compensated_weights"]


def compensated_weights(
    found: Mapping[str, Compensation], modules: Iterable[str]
) -> Iterator[CompensatedWeight]:
    """Yield the gain for each weight, in decibels, in the order of modules."""
    for module in modules:
        each = found.get(module)
        if each is None:
            continue
        yield CompensatedWeight(
            module=module,
            before_db=_decibels(each.signal, each.before),
            after_db=_decibels(each.signal, each.after),
            damping=each.damping,
            failed=each.failed,
        )


def _decibels(signal: float, error: float) -> float:
    if not error:
        return math.inf
    return 10 * math.log10(signal / error) if signal > 0 else -math.inf
