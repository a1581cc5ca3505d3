"""How the graphs of a calibration are run: which way of tracing, and what they run in."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from inlay.calibration.blocks import Blocks
from inlay.calibration.tracing import Enclosed, first_that_traces, left_alone, on_trial
from inlay.errors import ConfigurationError
from inlay.memory import collecting_garbage_later, keeping_freed_memory
from inlay.torch_private import observing_dynamo

if TYPE_CHECKING:
    from inlay.calibration.backend import Backend

__all__ = ["run_apart", "run_for_statistics", "running"]


@contextmanager
def running() -> Iterator[None]:
    """What graphs of a calibration run in, whoever calls them."""
    with (
        torch.no_grad(),
        observing_dynamo(),
        keeping_freed_memory(),
        collecting_garbage_later(),
    ):
        yield


def run_for_statistics(
    model: nn.Module, observing: "Backend", parts: "Backend"
) -> Callable[..., Any]:
    """Run a model by the quickest way of tracing that is right for it.

    :param observing: makes graphs that drop the outputs of the model
    :param parts: makes graphs that keep them, for a model that is traced in several
    """
    # Outputs can be dropped only if nothing but the caller sees them: in a single graph.
    whole = torch.compile(Enclosed(model), backend=observing, fullgraph=True)
    broken = torch.compile(Enclosed(model), backend=parts)
    apart = Blocks(model, observing).running(whole)
    # Blocks run one after another, so whatever fails may fail late. If the model itself is at
    # fault, tracing it as a whole says so.
    tried = [on_trial(way, model, observing, Exception) for way in apart]
    return first_that_traces([*tried, on_trial(whole, model, observing), broken])


def run_apart(model: nn.Module, observing: "Backend") -> Callable[..., Any]:
    """Run a model with its blocks as graphs of their own, and in no other way.

    :raises ConfigurationError: if the model has no blocks
    """
    whole = torch.compile(Enclosed(model), backend=observing, fullgraph=True)
    apart = Blocks(model, observing).running(whole)
    if not apart:
        raise ConfigurationError(
            f"{type(model).__name__} cannot be streamed, because it has no blocks: no two modules "
            "of one class stand in a row; calibrate it in memory"
        )
    (run,) = apart

    def leaving_the_model_alone(*args: Any, **kwargs: Any) -> Any:
        with left_alone(model):
            return run(*args, **kwargs)

    return leaving_the_model_alone
