"""The statistics of a slot, as one value: of a batch, a rank, a run, or all of them merged."""

import copy
import itertools
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from inlay.errors import StatisticsError
from inlay.observers import Observer, QParamsDict
from inlay.recipe import Slot
from inlay.reductions import merged, reduction_of
from inlay.statistics.functional import keeps_only_tensors, tensors_of
from inlay.statistics.rule import Rule, TensorSpec

__all__ = ["Statistics", "measure", "merge"]


@dataclass(eq=False, kw_only=True)
class Statistics:
    """What a slot has seen: tensors of fixed shape and dtype, and how much that was.

    A graph that observes updates the tensors in place; `current` gives a value that stays.

    :param slot: the slot, which says by its arguments how values are observed
    :param tensors: by name
    :param seen: how many values, an int64 scalar
    :param tokens: how many tokens, without padding, an int64 scalar
    :param live: the observer that keeps the statistics itself, if it cannot be traced
    :param is_complete: whether the tensors hold all that was learned; `live` may keep more
    """

    slot: Slot
    tensors: Mapping[str, torch.Tensor] = field(repr=False)
    seen: torch.Tensor
    tokens: torch.Tensor
    live: Observer | None = field(default=None, repr=False)
    is_complete: bool = True

    @classmethod
    def start(
        cls, rule: Rule, specs: Sequence[TensorSpec] | None, device: torch.device
    ) -> "Statistics":
        """The statistics of a slot that has seen nothing.

        :param specs: shapes of the statistics; None if the observer keeps them itself
        """
        with torch.inference_mode(False):
            return cls(
                slot=rule.slot,
                tensors={} if specs is None else rule.start(tuple(specs)),
                seen=torch.zeros((), dtype=torch.int64, device=device),
                tokens=torch.zeros((), dtype=torch.int64, device=device),
                live=rule.slot.make_observer() if specs is None else None,
            )

    @cached_property
    def rule(self) -> Rule:
        return Rule(self.slot)

    @cached_property
    def handle(self) -> int:
        """The number by which a graph finds statistics that an observer keeps itself."""
        number = next(_HANDLES)
        _BY_HANDLE[number] = self
        return number

    @staticmethod
    def of_handle(handle: int) -> "Statistics":
        return _BY_HANDLE[handle]

    @property
    def is_empty(self) -> bool:
        return int(self.seen) == 0

    def inputs(self) -> dict[str, torch.Tensor]:
        """What an observe node takes after the value, by name."""
        counts = {"seen": self.seen, "tokens": self.tokens}
        if self.live is not None:
            return {**counts, "handle": torch.tensor(self.handle)}
        return {**counts, **self.tensors}

    def current(self) -> "Statistics":
        """The statistics as they are now, in tensors of their own."""
        tensors = self.tensors if self.live is None else tensors_of(self.live)
        return replace(
            self,
            tensors={name: tensor.clone() for name, tensor in tensors.items()},
            seen=self.seen.clone(),
            tokens=self.tokens.clone(),
            is_complete=self.is_complete
            and (self.live is None or keeps_only_tensors(self.live, self.slot.make_observer())),
        )

    def observer(self) -> Observer:
        """An eager observer with these statistics."""
        observer = self.slot.make_observer() if self.live is None else copy.deepcopy(self.live)
        observer.slot = self.slot.name
        if not self.is_empty:
            for name, tensor in self.tensors.items():
                setattr(observer, name, tensor.clone())
        return observer

    def for_slot(self, slot: Slot) -> "Statistics":
        """The same statistics as those of another slot, or of the same under other arguments."""
        return replace(self, slot=slot)

    def qparams(self) -> QParamsDict:
        """Compute scale, zero point and global scale."""
        return self.observer().get_qparams()

    def restore(self, stored: "Statistics") -> None:
        """Go on from statistics that were stored.

        :raises StatisticsError: if they have other shapes or dtypes than what is observed now
        """
        for name, tensor in stored.tensors.items():
            if self.live is not None:
                setattr(self.live, name, tensor.to(self.seen.device))
                continue
            own = self.tensors.get(name)
            if own is None or own.shape != tensor.shape or own.dtype != tensor.dtype:
                raise StatisticsError(
                    f"{self.slot.name}: stored {name} {tuple(tensor.shape)} {tensor.dtype} does "
                    f"not fit {self.described()}; go on with the same model and dtype"
                )
            own.copy_(tensor)
        self.seen.copy_(stored.seen)
        self.tokens.copy_(stored.tokens)

    def described(self) -> str:
        """Names, shapes and dtypes of the statistics, for errors."""
        if self.live is not None:
            return f"what {self.slot.observer} keeps by itself"
        return ", ".join(
            f"{name} {tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"
            for name, tensor in self.tensors.items()
        )


_HANDLES = itertools.count()
_BY_HANDLE: "weakref.WeakValueDictionary[int, Statistics]" = weakref.WeakValueDictionary()


@torch.no_grad()
def measure(slot: Slot, value: torch.Tensor, mask: torch.Tensor | None = None) -> Statistics:
    """The statistics of a value alone, for a slot with a built-in observer.

    :param mask: a number for each token, zero for padding
    """
    rule = Rule(slot)
    if not rule.measures:
        raise StatisticsError(
            f"{slot.name}: {rule.name} cannot measure a value alone; it takes values in one after "
            "another, with update_statistics_from_observed"
        )
    valid = rule.valid(value, mask)
    count = torch.zeros((), dtype=torch.int64, device=value.device)
    tokens = rule.tokens(value) if valid is None else valid.sum()
    return Statistics(
        slot=slot, tensors=rule.measure(value, valid), seen=count + 1, tokens=count + tokens
    )


def merge(one: Statistics, *others: Statistics) -> Statistics:
    """The statistics of several sources as those of all.

    It does not matter which is which, nor how several are put together: minima, maxima and sums are
    merged as such, averages are weighted by the number of values. (In the order of batches, moving
    averages follow their values instead; see `MovingAverage`.)

    :raises StatisticsError: if other rules gathered them, or they are those of the last batch
    """
    sources = [source for source in (one, *others) if not source.is_empty]
    if any(source.rule != one.rule for source in others):
        raise StatisticsError("they were gathered by other rules")
    if len(sources) < 2:
        return (sources[0] if sources else one).current()
    one = sources[0]
    if not all(source.is_complete for source in sources):
        raise StatisticsError(
            f"{one.slot.observer} keeps what it learns outside of tensors, which cannot be merged"
        )
    operations = type(one.rule.observer)._act_sync_dict
    last_only = sorted(set(one.tensors) - set(operations))
    if last_only:
        raise StatisticsError(
            f"{one.slot.observer} keeps {', '.join(last_only)} of the last batch only"
        )
    return Statistics(
        slot=one.slot,
        tensors={
            name: merged(
                reduction_of(operations[name], f"{one.slot.name}: {name}"),
                [(source.tensors[name], int(source.seen)) for source in sources],
            )
            for name in one.tensors
        },
        seen=torch.stack([source.seen for source in sources]).sum(),
        tokens=torch.stack([source.tokens for source in sources]).sum(),
    )
