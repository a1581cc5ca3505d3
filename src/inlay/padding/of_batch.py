"""The padding of the batch that runs now."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from inlay.errors import StatisticsError
from inlay.graph import PaddingMask
from inlay.padding.layouts import Layouts
from inlay.padding.probing import Prober
from inlay.padding.valid_tokens import has_padding, valid_tokens
from inlay.recipe import Plan, Slot

__all__ = ["BatchPadding", "Padding"]


@dataclass(frozen=True, eq=False)
class BatchPadding:
    """The padding of one batch.

    :param valid: the valid tokens (batch, tokens) of its sequences
    :param layouts: where values have these tokens
    """

    valid: Mapping[str, torch.Tensor]
    layouts: Layouts
    _arranged: dict[PaddingMask, torch.Tensor] = field(default_factory=dict)

    def mask(self, wanted: PaddingMask) -> torch.Tensor:
        """Return the valid tokens in the layout of a value."""
        if wanted not in self._arranged:
            self._arranged[wanted] = wanted.of(self.valid[wanted.sequence])
        return self._arranged[wanted]


class Padding:
    """The padding of the batch that runs now, for all graphs of a calibration.

    :param model: returns the model
    :ivar current: the padding of the batch; None if all of its tokens are valid, or count
    :ivar is_known: whether a batch runs whose padding is known
    """

    def __init__(self, model: Callable[[], nn.Module], plan: Plan) -> None:
        self._model, self._plan = model, plan
        self._prober = Prober(model, plan)
        self.current: BatchPadding | None = None
        self.is_known = False
        self._problem: StatisticsError | None = None
        self._last: Layouts | None = None  # of a batch that a graph was called with

    @contextmanager
    def of_batch(self, batch: Mapping[str, Any], *, counts: bool, compares: bool) -> Iterator[None]:
        """Let graphs that run meanwhile leave out the padding of a batch.

        :param batch: arguments of the model by name
        :param counts: whether padding is observed
        :param compares: whether layers are compared, which leaves out padding where that is known
        :raises StatisticsError: if it cannot be left out of a slot that is observed
        """
        self._problem = None
        current = None
        try:
            current = None if counts and not compares else self._of(batch, compares)
        except StatisticsError:
            if not compares:
                raise
        try:
            with self.using(current):
                yield
        except Exception as error:
            if self._problem is None:
                raise
            raise self._problem from error

    def _of(self, batch: Mapping[str, Any], compares: bool) -> BatchPadding | None:
        valid = valid_tokens(batch)
        if not has_padding(valid):
            return None
        padding = BatchPadding(valid, self._prober.layouts(batch, valid))
        for slot in () if compares else self._observed():
            problem = padding.layouts.problem(slot)
            # A module that no small batch has reached may not be reached at all.
            if problem is not None and padding.layouts.has(slot):
                raise StatisticsError(problem)
        return padding

    @contextmanager
    def using(self, padding: BatchPadding | None) -> Iterator[None]:
        """Let graphs that run meanwhile leave out this padding."""
        before = self.current, self.is_known
        self.current, self.is_known = padding, True
        try:
            yield
        finally:
            self.current, self.is_known = before

    @contextmanager
    def of_graph(self, arguments: Mapping[str, Any], *, observes: bool) -> Iterator[None]:
        """Let a graph that was not called with a known batch leave out padding.

        That is the case for a model that its owner has compiled with the backend of a calibration.

        :param arguments: those of the model that the graph reads, by name
        :param observes: whether anything is observed in the graph
        :raises StatisticsError: if the graph does not read the mask, and others have
        """
        current = None
        taken = inspect.signature(self._model().forward).parameters
        arguments = {name: value for name, value in arguments.items() if name in taken}
        valid = {} if self.is_known else valid_tokens(arguments)
        if has_padding(valid):
            try:
                self._last = self._prober.layouts(arguments, valid)
            except StatisticsError:
                # After a graph break, a graph does not read all that the model is called with.
                if self._last is None or self._last.masked != frozenset(valid):
                    raise
            current = BatchPadding(valid, self._last)
        elif observes and not valid and not self.is_known and self._last is not None:
            raise StatisticsError(
                "a graph of the model reads no attention_mask, which others read, and would count "
                "padding; run batches by Calibration.observe, use batch_size=1, or count padding "
                "with count_padding=True"
            )
        if self.is_known:
            yield
            return
        with self.using(current):
            yield

    @contextmanager
    def noting_problems(self) -> Iterator[None]:
        """Keep a refusal, which Dynamo wraps in errors of its own."""
        try:
            yield
        except StatisticsError as error:
            self._problem = error
            raise

    def _observed(self) -> Iterator[Slot]:
        yield from self._plan.activation_slots()
        yield from self._plan.watching_slots()
        yield from self._plan.channel_slots()
