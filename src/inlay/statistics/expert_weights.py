"""Observe the weights of experts, many at a time."""

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from inlay.observers import MeasuringObserver, Observer
from inlay.progress import watched
from inlay.recipe import Plan, Slot

__all__ = ["observe_expert_weights"]

# Elements of the experts that are observed at once: 64 MB in float32, and several times that while
# they are searched.
_TOGETHER = 2**24


def observe_expert_weights(
    plan: Plan,
    observers: Mapping[str, Observer],
    weight_of: Callable[[Slot], torch.Tensor],
    progress: bool | None = None,
) -> set[str]:
    """Let the observers of experts see their weights, where they can see several at once.

    :param observers: by slot; of all slots, or of those whose ranges this process searches
    :return: the names of the slots whose observers have seen their weights
    """
    done: set[str] = set()
    chunks = list(_chunks(plan, observers))
    for slots in watched(chunks, "observing experts", show=progress) if chunks else ():
        own = [observers[slot.name] for slot in slots]
        measuring = [observer for observer in own if isinstance(observer, MeasuringObserver)]
        weights = torch.stack([weight_of(slot).detach() for slot in slots])
        type(measuring[0]).observe_weights(measuring, weights)
        done.update(slot.name for slot in slots)
    return done


def _chunks(plan: Plan, observers: Mapping[str, Observer]) -> Iterator[Sequence[Slot]]:
    """Yield the slots of experts whose weights are observed together, as many as memory takes."""
    for stack in plan.stacks.values():
        slots = [plan.slots[f"{name}.weight"] for name in stack.members]
        cls = slots[0].observer_class
        if not issubclass(cls, MeasuringObserver) or not cls.measures_weights():
            continue
        parts = len(stack.projections)
        size = max(1, _TOGETHER * parts // stack.parameter[0].numel())
        for part in range(parts):  # members are listed expert by expert
            alike = [slot for slot in slots[part::parts] if slot.name in observers]
            yield from (alike[start : start + size] for start in range(0, len(alike), size))
