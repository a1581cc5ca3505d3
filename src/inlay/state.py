"""State of observers in a graph: tensors of fixed shape and dtype, outside it, passed in.

An observer is a class that keeps its statistics in attributes. A graph wants a function. The
functional view sets the state as attributes on a shadow of the observer, lets it take in a value,
and reads the attributes back. Code that asks whether statistics are there already behaves in two
ways, on the first value and on later ones: both are traced, and a flag selects between them.
"""

import copy
import itertools
import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from compressed_tensors.quantization.utils import calculate_range
from torch.fx import Node

from inlay.errors import StatisticsError
from inlay.graph import constants_allowed, fake_mode
from inlay.observers import Observer, flatten_for_calibration
from inlay.recipe import make_observer
from inlay.slots import Slot
from inlay.stored import SlotStatistics

__all__ = [
    "OBSERVES",
    "Observe",
    "ObserveWeight",
    "Rule",
    "SlotState",
    "TensorSpec",
    "is_importance_weighted",
    "observes",
    "warm_up",
]

OBSERVES = "inlay_observes"  # key of node.meta: the slots an observe node observes


def observes(node: Node) -> tuple[Slot, ...]:
    """The slots that an observe node observes; none for other nodes."""
    slots: tuple[Slot, ...] = node.meta.get(OBSERVES, ())
    return slots


def is_importance_weighted(slot: Slot) -> bool:
    """Whether the observer of a weight wants to see the inputs of its module."""
    return make_observer(slot.base_name, slot.args).observes_input


@dataclass(frozen=True)
class TensorSpec:
    """Shape, dtype and device of one statistic."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def __str__(self) -> str:
        return f"{self.name} {tuple(self.shape)} {self.dtype} on {self.device}"


class Rule:
    """How a value is observed: an observer without statistics, and what it is asked to do."""

    def __init__(self, slot: Slot) -> None:
        self.watches_input_of_weight = slot.base_name == "importance"
        base_name = "weight" if self.watches_input_of_weight else slot.base_name
        self.observer = make_observer(base_name, slot.args)
        self.name = slot.args.observer or type(self.observer).__name__
        # Slots with equal keys observe the same value in the same way.
        kind = "attention" if base_name in "qkv" else base_name.replace("output", "input")
        self.key = (type(self.observer), kind, self.watches_input_of_weight, repr(slot.args))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Rule) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def take_in(
        self, observer: Observer, value: torch.Tensor, mask: torch.Tensor | None = None
    ) -> None:
        """Let an observer with statistics of its own see a value."""
        self._take_in(observer, self.flatten(value), self.valid(value, mask))

    def flatten(self, value: torch.Tensor) -> torch.Tensor:
        """The value in the shape that the observer takes in."""
        if self.watches_input_of_weight:
            return value
        return flatten_for_calibration(value, self.observer.base_name, self.observer.args)

    def valid(self, value: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor | None:
        """Which observations of the flattened value count, of shape (num_observations,)."""
        if mask is None:
            return None
        valid = mask.reshape(-1) != 0
        repeats = 1 if self.is_attention else math.prod(value.shape[mask.ndim : -1])
        if value.ndim <= mask.ndim or repeats == 1:
            return valid
        return valid.unsqueeze(-1).expand(-1, repeats).reshape(-1)

    def tokens(self, value: torch.Tensor) -> int:
        """How many observations a value is."""
        return math.prod(value.shape[0:3:2] if self.is_attention else value.shape[:-1])

    @property
    def is_attention(self) -> bool:
        return self.observer.base_name in ("q", "k", "v")

    @property
    def leaves_out_padding(self) -> bool:
        """Whether the observer can, in the shape that the value has."""
        of, method = type(self.observer), "update_statistics_from_valid"
        if self.watches_input_of_weight:
            method = "observe_valid_input"
        return getattr(of, method) is not getattr(Observer, method)

    def _take_in(self, observer: Observer, flat: torch.Tensor, valid: torch.Tensor | None) -> None:
        if self.watches_input_of_weight:
            if valid is None:
                observer.observe_input(flat)
            else:
                observer.observe_valid_input(flat.reshape(-1, flat.size(-1)), valid)
        elif valid is None:
            observer.update_statistics_from_observed(flat)
        else:
            observer.update_statistics_from_valid(flat, valid)

    def constants(self) -> dict[str, torch.Tensor]:
        """Tensors the observer has before it sees anything: the start of its state."""
        return _tensors(self.observer)

    def run(
        self,
        flat: torch.Tensor,
        state: dict[str, torch.Tensor],
        valid: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        """Take in a flattened value on top of `state` and return the tensors there are then."""
        shadow = copy.copy(self.observer)
        shadow._buffers = dict(shadow._buffers)
        for name, tensor in state.items():
            setattr(shadow, name, tensor.clone())
        before = _plain_values(shadow)
        self._take_in(shadow, flat, valid)
        after = _plain_values(shadow)
        changed = [name for name in after if not _same(before.get(name), after[name])]
        if changed:
            raise StatisticsError(
                f"it keeps what it learns in {', '.join(changed)}, which is not a tensor"
            )
        return _tensors(shadow)

    def specs(self, value: torch.Tensor) -> tuple[TensorSpec, ...]:
        """What the state looks like, found by observing a value without data in it.

        Raises whatever the observer raises if it cannot do without data.
        """
        warm_up(self.observer, value.device)
        mode = fake_mode(value)
        assert mode is not None, "specs are found with fake tensors"
        with mode, constants_allowed(mode), torch.no_grad():
            start = {
                name: torch.empty_like(tensor, device=value.device)
                for name, tensor in self.constants().items()
            }
            flat = self.flatten(value)
            first = self.run(flat, start)
            later = self.run(flat, first)
        specs = _specs(first)
        if _specs(later) != specs:
            raise StatisticsError(
                "its statistics change shape or dtype from the first value to the next"
            )
        if not all(isinstance(size, int) for spec in specs for size in spec.shape):
            raise StatisticsError("the shape of its statistics depends on that of the value")
        return specs


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
        mode = fake_mode(value)
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
        own = _tensors(self.observer) if self.observe.reason is not None else self.tensors
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


def warm_up(observer: Observer, device: torch.device) -> None:
    """Let compressed-tensors cache its ranges with real tensors.

    It remembers them by type, bits and device. Were the first call for a key made while tracing, a
    tensor without data would be remembered, for good.
    """
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with unset_fake_temporarily():
        calculate_range(observer.args, device)


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


def _tensors(observer: Observer) -> dict[str, torch.Tensor]:
    own = {**vars(observer), **observer._buffers}
    return {name: value for name, value in sorted(own.items()) if isinstance(value, torch.Tensor)}


def _plain_values(observer: Observer) -> dict[str, Any]:
    """Attributes that are not tensors; those that torch keeps for itself do not count."""
    ignored = {"_buffers", "_parameters", "_modules"}
    return {
        name: value
        for name, value in vars(observer).items()
        if not isinstance(value, torch.Tensor) and name not in ignored and value is not None
    }


def _same(one: Any, other: Any) -> bool:
    return one is other or bool(type(one) is type(other) and one == other)


def _specs(tensors: dict[str, torch.Tensor]) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(name, tuple(tensor.shape), tensor.dtype, tensor.device)
        for name, tensor in tensors.items()
    )
