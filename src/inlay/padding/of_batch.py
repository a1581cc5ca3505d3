"""The padding of the batch that runs now."""

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
        self._plan = plan
        self._prober = Prober(model, plan)
        self.current: BatchPadding | None = None
        self.is_known = False
        self._problem: StatisticsError | None = None

    @contextmanager
    def of_batch(
        self, batch: Mapping[str, Any], *, counts: bool, is_required: bool
    ) -> Iterator[None]:
        """Let graphs that run meanwhile leave out the padding of a batch.

        :param batch: arguments of the model by name
        :param counts: whether padding counts
        :param is_required: whether padding that cannot be left out is an error
        :raises StatisticsError: if it cannot be left out of a slot that is observed
        """
        self._problem = None
        current = None
        try:
            current = None if counts else self._of(batch)
        except StatisticsError:
            if is_required:
                raise
        try:
            with self.using(current):
                yield
        except Exception as error:
            if self._problem is None:
                raise
            raise self._problem from error

    def _of(self, batch: Mapping[str, Any]) -> BatchPadding | None:
        valid = valid_tokens(batch)
        if not has_padding(valid):
            return None
        padding = BatchPadding(valid, self._prober.layouts(batch, valid))
        for slot in self._observed():
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
    def noting_problems(self) -> Iterator[None]:
        """Keep a refusal, which Dynamo wraps in errors of its own."""
        try:
            yield
        except StatisticsError as error:
            self._problem = error
            raise

    def _observed(self) -> Iterator[Slot]:
        yield from self._plan.activation_slots()
        yield from self._plan.importance_slots()
        yield from self._plan.channel_slots()
