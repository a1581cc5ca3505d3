"""Statistics of all slots of a model under a recipe, and the qparams that follow from them."""

import copy
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationStrategy
from torch import nn

from inlay.errors import ConfigurationError, StatisticsError
from inlay.nodes.observe import Observe, SlotState
from inlay.nodes.quantize import fold_weight
from inlay.observers import (
    Observer,
    QParamsDict,
    sync_observers,
)
from inlay.progress import watched
from inlay.recipe import Plan, Recipe, Slot, make_observer
from inlay.statistics.on_disk import SlotStatistics

__all__ = ["ACCEPTABLE", "Statistics"]

# What `finalize` refuses, and accepts if asked to.
ACCEPTABLE = {
    "unobserved": "slots that saw no data stay in full precision",
    "not_finite": "slots with NaN or Inf in their statistics stay in full precision",
    "unfused": "layers that are served as one keep global scales of their own",
}


class Statistics:
    """State and qparams of all slots of one calibration."""

    def __init__(self, model: nn.Module, recipe: Recipe) -> None:
        self.plan = Plan(model, recipe)
        self.show_progress: bool | None = None  # where there is a terminal
        self.qparams: dict[str, QParamsDict] | None = None
        # Weak, like everything that a compiled graph leads to: the model is its owner's.
        self._modules = {
            slot.module: weakref.ref(model.get_submodule(slot.module))
            for slot in self.plan.slots.values()
        }
        self._states: dict[str, SlotState] = {}
        # Statistics of an earlier run, by slot: what a state starts with when it is made.
        self._stored: dict[str, SlotStatistics] = {}
        self._folded: dict[str, torch.Tensor] = {}
        self.accepted: frozenset[str] = frozenset()  # problems that `finalize` was told to accept

    @property
    def is_final(self) -> bool:
        return self.qparams is not None

    def state(self, slots: Sequence[Slot], observe: Observe, device: torch.device) -> SlotState:
        """The state that these slots share, made when it is first asked for."""
        states = [self._states.get(slot.name) for slot in slots]
        known = next((state for state in states if state is not None), None)
        if known is None:
            known = SlotState(slots, observe, device)
            if slots[0].name in self._stored:
                known.restore(self._stored[slots[0].name])
            self._states.update({slot.name: known for slot in slots})
        elif known.slots != tuple(slots):
            raise StatisticsError(
                f"one graph of the model observes {_names(known.slots)} as one value, another "
                f"{_names(slots)}; calibrate with passes without ShareObservers"
            )
        known.require(observe)
        return known

    def quantized_value(self, slot: Slot, key: str) -> torch.Tensor:
        """A qparam of a slot, or its folded weight."""
        assert self.qparams is not None
        if key == "folded":
            return self._fold(slot)
        value = self.qparams[slot.name][key]  # type: ignore[literal-required]
        assert isinstance(value, torch.Tensor)
        return value

    def _fold(self, slot: Slot) -> torch.Tensor:
        if slot.name not in self._folded:
            assert self.qparams is not None
            weight = self._weight(slot)
            self._folded[slot.name] = fold_weight(weight, slot.args, self.qparams[slot.name])
        return self._folded[slot.name]

    def borrowed(self) -> "Statistics":
        """The same statistics, except that weights folded from now on go when this goes."""
        borrowed = copy.copy(self)
        borrowed._folded = dict(self._folded)
        return borrowed

    def signature(self, module: str | None) -> tuple[Any, ...]:
        """How a module is quantized, and which of its slots have qparams."""
        if module is None or self.qparams is None:
            return self.plan.signature(module)
        known = tuple(slot.name in self.qparams for slot in self.plan.of_module(module).values())
        return (*self.plan.signature(module), *known)

    def seen(self, slot: Slot) -> int:
        """How many values a slot has seen."""
        state = self._states.get(slot.name) or self._stored.get(slot.name)
        return 0 if state is None else int(state.seen)

    def tokens(self, slot: Slot) -> int:
        """How many tokens a slot has seen, without padding."""
        state = self._states.get(slot.name) or self._stored.get(slot.name)
        return 0 if state is None else int(state.tokens)

    def restore(self, stored: Mapping[str, SlotStatistics]) -> None:
        """Start from the statistics of an earlier run, as far as they carry this recipe."""
        wanted = {slot.name: slot for slot in self.plan.activation_slots()}
        for slot in self.plan.weight_slots():
            wanted[f"{slot.module}.importance"] = Slot(slot.module, "importance", slot.args)
        problems = {}
        for name, slot in wanted.items():
            if name not in stored:
                continue
            problem = stored[name].problem(slot.args, slot.base_name)
            if problem is None:
                self._stored[name] = stored[name]
            elif slot.base_name != "importance":  # a weight may be observed without
                problems[name] = problem
        if problems:
            raise StatisticsError(
                "the stored statistics do not carry this recipe: "
                + "; ".join(f"{name}: {problem}" for name, problem in problems.items())
                + ". Calibrate again with data"
            )

    def snapshot(self) -> dict[str, SlotStatistics]:
        """Statistics gathered so far, by slot, to be stored."""
        found = dict(self._stored)
        for state in dict.fromkeys(self._states.values()):
            if int(state.seen) == 0:
                continue
            tensors = state.statistics()
            for slot in state.slots:
                found[slot.name] = SlotStatistics(
                    base_name=slot.base_name,
                    args=slot.args,
                    seen=int(state.seen),
                    tokens=int(state.tokens),
                    tensors=tensors,
                )
        return found

    def activation_observer(self, slot: Slot) -> Observer:
        """An eager observer with what is known of a slot; without statistics if nothing is."""
        state, stored = self._states.get(slot.name), self._stored.get(slot.name)
        if state is not None:
            observer = state.observed()
        else:
            observer = make_observer(slot.base_name, slot.args)
            if stored is not None:
                for name, tensor in stored.tensors.items():
                    setattr(observer, name, tensor.clone())
                observer._unsynced_observations = stored.seen
        observer.slot = slot.name
        return observer

    def shared_with(self, slot: Slot) -> tuple[Slot, ...]:
        state = self._states.get(slot.name)
        return () if state is None else state.slots

    def finalize(self, accept: Collection[str] = ()) -> dict[str, QParamsDict]:
        """Compute the qparams of all slots, after checking that they can be computed."""
        unknown = sorted(set(accept) - set(ACCEPTABLE))
        if unknown:
            raise ConfigurationError(
                f"cannot accept {', '.join(unknown)}; what can be accepted is "
                + "; ".join(f"{name}: {meaning}" for name, meaning in ACCEPTABLE.items())
            )
        if self.qparams is None:
            self.qparams = self._compute(frozenset(accept))
            self.accepted = frozenset(accept)
        return self.qparams

    def _compute(self, accept: frozenset[str]) -> dict[str, QParamsDict]:
        observers = self._activation_observers(accept)
        observers.update(self._weight_observers(accept))
        qparams: dict[str, QParamsDict] = {}
        broken = []
        known: dict[int, str] = {}  # slots that share a state share what follows from it
        for name, observer in watched(
            observers.items(), "computing scales", show=self.show_progress
        ):
            state = self._states.get(name)
            alike = None if state is None else known.setdefault(id(state), name)
            if alike in qparams:
                qparams[name] = qparams[alike]
                continue
            try:
                qparams[name] = observer.get_qparams()
            except StatisticsError as error:
                broken.append(str(error))
        if broken and "not_finite" not in accept:
            raise StatisticsError(
                f"{len(broken)} slots have no usable statistics: "
                + "; ".join(broken)
                + '. finalize(accept={"not_finite"}) leaves them in full precision'
            )
        return qparams

    def _activation_observers(self, accept: frozenset[str]) -> dict[str, Observer]:
        slots = list(self.plan.activation_slots())
        # A rank that never ran a slot takes part in the merge with an observer all the same.
        observers = {slot.name: self.activation_observer(slot) for slot in slots}
        sync_observers(observers.values())
        unobserved = [name for name, observer in observers.items() if not observer.has_statistics]
        if unobserved and "unobserved" not in accept:
            raise StatisticsError(
                f"{len(unobserved)} of {len(slots)} slots saw no data: {', '.join(unobserved)}. "
                "Run batches that reach them, ignore their modules in the recipe, or leave them in "
                'full precision with finalize(accept={"unobserved"})'
                + _hint_for_attention(unobserved)
            )
        return {name: o for name, o in observers.items() if name not in set(unobserved)}

    def _weight_observers(self, accept: frozenset[str]) -> dict[str, Observer]:
        observers = {}
        for slot in self.plan.weight_slots():
            observer = make_observer("weight", slot.args)
            observer.slot = slot.name
            name = f"{slot.module}.importance"
            importance = self._states.get(name) or self._stored.get(name)
            if importance is not None and int(importance.seen) > 0 and observer.observes_input:
                for name, tensor in importance.tensors.items():
                    setattr(observer, name, tensor.clone())
            observers[slot.name] = observer
        weighted = [o for o in observers.values() if o.observes_input]
        sync_observers(weighted)
        self._fuse(observers, accept)
        observed: dict[tuple[int, str], Observer] = {}
        for slot in watched(self.plan.weight_slots(), "observing weights", show=self.show_progress):
            # Tied weights are one weight, as long as they are quantized alike.
            weight = self._weight(slot)
            observer = observed.setdefault((id(weight), repr(slot.args)), observers[slot.name])
            if observer is observers[slot.name]:
                observer(weight.detach())
            observers[slot.name] = observer
        return observers

    def _fuse(self, observers: dict[str, Observer], accept: frozenset[str]) -> None:
        """Link the observers of layers that share a global scale."""
        refused = []
        for parent, members in self.plan.fused_groups():
            group = {m: observers.get(f"{parent}{m}.weight") for m in members}
            formats = {m: _global_format(observer) for m, observer in group.items()}
            if not any(formats.values()):
                continue
            if len(set(formats.values())) > 1:
                found = (f"{m} ({format or 'no global scale'})" for m, format in formats.items())
                refused.append(f"{parent}{{{', '.join(found)}}}")
                continue
            Observer.fuse(o for o in group.values() if o is not None)
        if refused and "unfused" not in accept:
            raise StatisticsError(
                "layers that are served as one need one global scale, and so the same scheme: "
                + "; ".join(refused)
                + '. Target or ignore all of them, or use finalize(accept={"unfused"})'
            )

    def _weight(self, slot: Slot) -> torch.Tensor:
        module = self._modules[slot.module]()
        if module is None:
            raise StatisticsError(f"the model is gone, and with it the weight of {slot.module}")
        weight = module.weight
        assert isinstance(weight, torch.Tensor)
        return weight


def _hint_for_attention(unobserved: list[str]) -> str:
    if not any(name.rpartition(".")[2] in ("q", "k", "v") for name in unobserved):
        return ""
    return (
        ". Attention is observed where scaled_dot_product_attention computes it; load the model "
        'with attn_implementation="sdpa"'
    )


def _names(slots: Iterable[Slot]) -> str:
    return ", ".join(slot.name for slot in slots)


def _global_format(observer: Observer | None) -> str | None:
    if observer is None or observer.args.strategy != QuantizationStrategy.TENSOR_GROUP:
        return None
    args = observer.args
    return f"{args.type}{args.num_bits} in groups of {args.group_size}"
