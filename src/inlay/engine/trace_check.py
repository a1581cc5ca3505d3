"""Checking that the graphs that were calibrated compute what the model does."""

import warnings
from collections.abc import Collection
from typing import Any

from inlay.engine.run import Run
from inlay.errors import CheckError
from inlay.evaluation.compare import prepared
from inlay.evaluation.traced import compare_traced

__all__ = ["check_trace"]


def check_trace(run: Run, shortest: Any, *, accept: Collection[str]) -> None:
    """Compare the traced model with the eager one on one sample, and keep the result on the run.

    Tracing can change what a model computes, and then its statistics are those of another model.

    :param shortest: a batch that was observed; it is run if no data is held out
    :raises CheckError: if outputs differ by more than rounding explains, and `accept` does not
        contain "mistraced"
    """
    held_out = bool(run.held_out)
    if not held_out and shortest is None:
        return
    batch = prepared(run.model, run.held_out if held_out else [shortest])[0]
    what = "a held-out sample" if held_out else "the shortest calibration sample"
    agreement = run.graphs.agreement = compare_traced(run.model, run, batch, what)
    if agreement or agreement.unknown:
        return
    if "mistraced" in accept:
        warnings.warn(f"{agreement}; ranges are those of the traced model", stacklevel=7)
        return
    raise CheckError(
        f"{agreement}. torch.compile does not trace {type(run.model).__name__} faithfully, so its "
        "ranges would be those of another model. Try other versions of torch and transformers, and "
        'report the model to its authors. calibrate(accept={"mistraced"}) goes on nevertheless'
    )
