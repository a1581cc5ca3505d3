"""Ways to have Dynamo trace a model, from the quickest to the one that always works."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from inlay.torch_private import graph_break_errors

__all__ = ["Enclosed", "ResistsError", "first_that_traces", "without_cache"]


class ResistsError(Exception):
    """A model cannot be run in a way that others can; nothing was observed yet."""


class Enclosed(nn.Module):
    """A model inside a module of Inlay's own, so that Dynamo traces the model itself.

    The user may have compiled the model in place, and then calling it runs that code. Dynamo also
    keeps a limited number of compilations for each `forward`, which are the user's.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)


def without_cache(model: nn.Module, batch: Mapping[str, Any]) -> Mapping[str, Any]:
    """The batch, and that the model is to keep no keys and values.

    Nobody reads them, and a block that keeps some cannot run as a graph of its own.
    """
    if "use_cache" in batch or "use_cache" not in inspect.signature(model.forward).parameters:
        return batch
    return {**batch, "use_cache": False}


def first_that_traces(ways: Sequence[Callable[..., Any]]) -> Callable[..., Any]:
    """Run by the first way whose graph Dynamo can trace without a break, from then on by that one.

    :param ways: ways to run the same; the last one takes breaks
    """
    left = list(ways)
    resisting: tuple[type[Exception], ...] = (ResistsError, *graph_break_errors())

    def run(*args: Any, **kwargs: Any) -> Any:
        while len(left) > 1:
            try:
                return left[0](*args, **kwargs)
            except resisting:
                del left[0]
        return left[0](*args, **kwargs)

    return run
