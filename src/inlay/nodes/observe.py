"""State of observers in a graph: tensors of fixed shape and dtype, outside it, passed in.

Code that asks whether statistics are there already behaves in two ways, on the first value and on
later ones: both are traced, and a flag selects between them.
"""

import copy
import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from inlay.errors import StatisticsError
from inlay.observers import Observer
from inlay.recipe import Slot
from inlay.statistics.on_disk import SlotStatistics
from inlay.statistics.rule import Rule, TensorSpec, tensors_of
from inlay.torch_private import fake_mode_of

__all__ = ["Observe", "ObserveWeight", "SlotState"]


@dataclass(frozen=True)
class Observe:
    """The callable of an observe node: updates the state it is given from a value.

    Arguments are the value, how many values and how many tokens were seen before, the state, and
    the mask of a batch with padding.
    """

    rule: Rule
    specs: tuple[TensorSpec, ...] = ()
    reason: str | None = None  # why the observer runs as it is, outside the compiled graph
    __name__ = "observe"

    @torch.no_grad()
    def __call__(
        self,
        value: torch.Tensor,
        seen: torch.Tensor,
        tokens: torch.Tensor,
        *state: torch.Tensor,
        mask: torch.Tensor | None = None,
    ) -> None:
        if isinstance(value.numel(), int) and value.numel() == 0:
            return
        value = value.detach()
        if self.reason is not None:
            torch.ops.inlay.observe(value, seen, tokens, *state, mask)
            return
        valid = self.rule.valid(value, mask)
        for old, new in zip(state, self.update(value, seen, state, valid), strict=True):
            old.copy_(new)
        seen.add_(1 if valid is None else valid.any().to(seen.dtype))
        tokens.add_(self.rule.tokens(value) if valid is None else valid.sum())

    def update(
        self,
        value: torch.Tensor,
        seen: torch.Tensor,
        state: Sequence[torch.Tensor],
        valid: torch.Tensor | None = None,
    ) -> list[torch.Tensor]:
        """The state after the value, as a function of the state before it."""
        new = self._updated(value, seen, state, valid)
        if valid is None:
            return new
        # A batch of nothing but padding changes nothing.
        return [torch.where(valid.any(), *pair) for pair in zip(new, state, strict=True)]

    def _updated(
        self,
        value: torch.Tensor,
        seen: torch.Tensor,
        state: Sequence[torch.Tensor],
        valid: torch.Tensor | None,
    ) -> list[torch.Tensor]:
        names = [spec.name for spec in self.specs]
        current = dict(zip(names, state, strict=True))
        given = {name: current[name] for name in self.rule.constants()}
        # The same tensor for both: what is expensive to compute of it is then computed once.
        flat = self.rule.flatten(value)
        first = self.rule.run(flat, given, valid)
        if len(given) == len(current):
            return [first[name] for name in names]
        later = self.rule.run(flat, current, valid)
        is_first = seen == 0
        # The state starts as zeros, so what is a sum needs no selection.
        sums = self.rule.observer._sums
        return [
            later[name] if name in sums else torch.where(is_first, first[name], later[name])
            for name in names
        ]

    def fake_state(self, value: torch.Tensor) -> dict[str, torch.Tensor]:
        """The inputs after the value, by name and without data."""
        mode = fake_mode_of(value)
        assert mode is not None, "a graph is traced with fake tensors"
        with mode:
            counters = {
                name: torch.empty((), dtype=torch.int64, device=value.device)
                for name in ("seen", "tokens")
            }
            if self.reason is not None:
                return {**counters, "handle": torch.empty((), dtype=torch.int64)}
            state = {
                spec.name: torch.empty(spec.shape, dtype=spec.dtype, device=spec.device)
                for spec in self.specs
            }
        return {**counters, **state}


@dataclass(frozen=True)
class ObserveWeight:
    """The callable of a weight's observe node. It does nothing while batches run."""

    rule: Rule
    __name__ = "observe_weight"

    def __call__(self, weight: torch.Tensor) -> None:
        return None


class SlotState:
    """Statistics of a slot, or of several that always see the same values."""

    def __init__(self, slots: Sequence[Slot], observe: Observe, device: torch.device) -> None:
        self.slots = tuple(slots)
        self.observe = observe
        # Only an observer that cannot be traced keeps its statistics itself.
        self.observer = copy.deepcopy(observe.rule.observer)
        with torch.inference_mode(False):
            self.seen = torch.zeros((), dtype=torch.int64, device=device)
            self.tokens = torch.zeros((), dtype=torch.int64, device=device)
            constants = observe.rule.constants()
            self.tensors = {
                spec.name: (
                    constants[spec.name].to(device).clone()
                    if spec.name in constants
                    else torch.zeros(spec.shape, dtype=spec.dtype, device=spec.device)
                )
                for spec in observe.specs
            }
        if observe.reason is not None:
            self._handle = next(_HANDLES)
            _OPAQUE[self._handle] = self
            self.tensors = {"handle": torch.tensor(self._handle)}

    def inputs(self) -> dict[str, torch.Tensor]:
        """What the observe node takes after the value, by name."""
        return {"seen": self.seen, "tokens": self.tokens, **self.tensors}

    def require(self, observe: Observe) -> None:
        """Refuse a graph that would write statistics of another kind here."""
        if observe != self.observe:
            raise StatisticsError(
                f"{self.slots[0].name} was observed as {_words(self.observe)} and is now observed "
                f"as {_words(observe)}; calibrate in one dtype and on one device"
            )

    def statistics(self) -> dict[str, torch.Tensor]:
        """The statistics as they are now, by name."""
        own = tensors_of(self.observer) if self.observe.reason is not None else self.tensors
        return {name: tensor.clone() for name, tensor in own.items()}

    def restore(self, stored: SlotStatistics) -> None:
        """Go on from statistics of an earlier run."""
        for name, tensor in stored.tensors.items():
            if self.observe.reason is not None:
                setattr(self.observer, name, tensor.to(self.seen.device))
                continue
            own = self.tensors.get(name)
            if own is None or own.shape != tensor.shape or own.dtype != tensor.dtype:
                raise StatisticsError(
                    f"{self.slots[0].name}: stored {name} {tuple(tensor.shape)} {tensor.dtype} "
                    f"does not fit {_words(self.observe)}; go on with the same model and dtype"
                )
            own.copy_(tensor)
        self.seen.fill_(stored.seen)
        self.tokens.fill_(stored.tokens)

    def observed(self) -> Observer:
        """An eager observer with the statistics gathered so far."""
        observer = copy.deepcopy(self.observer)
        count = int(self.seen)
        if self.observe.reason is None and count > 0:
            for name, tensor in self.tensors.items():
                setattr(observer, name, tensor.clone())
        observer._unsynced_observations = count
        return observer


_HANDLES = itertools.count()
_OPAQUE: "weakref.WeakValueDictionary[int, SlotState]" = weakref.WeakValueDictionary()


@torch.library.custom_op("inlay::observe", mutates_args={"seen", "tokens"})
def _observe_opaque(
    value: torch.Tensor,
    seen: torch.Tensor,
    tokens: torch.Tensor,
    handle: torch.Tensor,
    mask: torch.Tensor | None,
) -> None:
    """Run an observer that cannot be traced, on real values, in the middle of a compiled graph."""
    state = _OPAQUE[int(handle)]
    rule = state.observe.rule
    valid = rule.valid(value, mask)
    if valid is None or bool(valid.any()):
        rule.take_in(state.observer, value, mask)
        seen += 1
        tokens += rule.tokens(value) if valid is None else int(valid.sum())


@_observe_opaque.register_fake
def _(
    value: torch.Tensor,
    seen: torch.Tensor,
    tokens: torch.Tensor,
    handle: torch.Tensor,
    mask: torch.Tensor | None,
) -> None:
    return None


def _words(observe: Observe) -> str:
    return ", ".join(map(str, observe.specs)) or f"an opaque {observe.rule.name}"
