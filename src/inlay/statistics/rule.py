"""Rules: how a value is observed, as a function from statistics to statistics."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from compressed_tensors.quantization.utils import calculate_range

from inlay.errors import StatisticsError
from inlay.observers import MeasuringObserver, Observer, flatten_for_calibration
from inlay.ranges.args import key_of
from inlay.ranges.row_groups import RowGroups, beside
from inlay.recipe import Slot
from inlay.statistics.functional import (
    require_tensors_of_their_own,
    run_on_shadow,
    tensors_of,
    watching_ops,
)
from inlay.torch_private import (
    allow_real_tensors,
    fake_mode_of,
    without_fake_mode,
)

__all__ = ["Rule", "TensorSpec"]

Tensors = dict[str, torch.Tensor]


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
    """How the values of a slot are observed.

    Slots with equal rules observe the same value in the same way. A built-in observer measures a
    value and merges what it measured; any other goes through the functional view.
    """

    def __init__(self, slot: Slot) -> None:
        self.slot = slot
        self.name = slot.observer
        self.observer = slot.make_observer()
        kind = "attention" if slot.is_attention else slot.base_name.replace("output", "input")
        form = "" if slot.has_own_observer else key_of(slot.args)
        self.key = (type(self.observer), kind, slot.gathers, form)
        self.measures = _measures(type(self.observer), of_input=slot.watches_input)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Rule) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    @property
    def leaves_out_padding(self) -> bool:
        """Whether the observer can leave padding out of a value in the shape that it has."""
        method = (
            "observe_valid_input" if self.slot.watches_input else "update_statistics_from_valid"
        )
        return getattr(type(self.observer), method) is not getattr(Observer, method)

    def valid(self, value: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor | None:
        """Which observations of the flattened value count, of shape (num_observations,)."""
        if mask is None:
            return None
        valid = mask != 0
        if not self.slot.is_attention and mask.ndim < value.ndim:
            more = [1] * (value.ndim - 1 - mask.ndim)
            valid = valid.reshape(*mask.shape, *more).expand(value.shape[:-1])
        return valid.reshape(-1)

    def tokens(self, value: torch.Tensor) -> int:
        """How many observations a value is."""
        return math.prod(value.shape[0:3:2] if self.slot.is_attention else value.shape[:-1])

    def specs(self, value: torch.Tensor) -> tuple[TensorSpec, ...]:
        """Find the shapes of the statistics by observing a value without data.

        :raises Exception: whatever the observer raises if it cannot do without data
        """
        # compressed-tensors remembers ranges by type, bits and device. If its first call were made
        # while tracing, it would remember tensors without data, for good.
        with without_fake_mode():
            calculate_range(self.observer.args, value.device)
        mode = fake_mode_of(value)
        assert mode is not None, "specs are found with fake tensors"
        with mode, allow_real_tensors(mode), torch.no_grad():
            if self.measures:
                return _specs(self.measure(value))
        with mode, allow_real_tensors(mode), torch.no_grad(), watching_ops(mode):
            start = {
                name: torch.empty_like(tensor, device=value.device)
                for name, tensor in tensors_of(self.observer).items()
            }
            first = self._shadowed(start, value, None)
            require_tensors_of_their_own(start, first)
            later = self._shadowed(first, value, None)
        specs = _specs(first)
        if _specs(later) != specs:
            raise StatisticsError(
                "its statistics change shape or dtype from the first value to the next"
            )
        if not all(isinstance(size, int) for spec in specs for size in spec.shape):
            raise StatisticsError("the shape of its statistics depends on that of the value")
        return specs

    def start(self, specs: tuple[TensorSpec, ...]) -> Tensors:
        """The statistics before any value."""
        given = {} if self.measures else tensors_of(self.observer)
        return {
            spec.name: (
                given[spec.name].to(spec.device).clone()
                if spec.name in given
                else torch.full(
                    spec.shape, self._start_of(spec), dtype=spec.dtype, device=spec.device
                )
            )
            for spec in specs
        }

    def _start_of(self, spec: TensorSpec) -> float:
        number = self._merged_start(spec.name, spec.dtype)
        return 0.0 if number is None else number

    def _merged_start(self, name: str, dtype: torch.dtype) -> float | None:
        """The number from which a first value is merged like any other, if there is one."""
        if not isinstance(self.observer, MeasuringObserver) or not self.measures:
            return None
        reduction = self.observer.reduction(name)
        return None if reduction is None else reduction.start(dtype)

    def measure(self, value: torch.Tensor, valid: torch.Tensor | None = None) -> Tensors:
        """Compute the statistics of a value alone, for a built-in observer."""
        assert isinstance(self.observer, MeasuringObserver)
        if self.slot.watches_input:
            return self.observer.measure_input(value, valid)
        return self.observer.measure(self._flat(value), valid)

    def after(
        self,
        before: Tensors,
        seen: torch.Tensor,
        value: torch.Tensor,
        valid: torch.Tensor | None = None,
    ) -> Tensors:
        """Compute the statistics after a value from those before it.

        :param seen: how many values there were before
        """
        is_first = seen == 0
        first = self.first(before, value, valid)
        if isinstance(self.observer, MeasuringObserver) and self.measures:
            later = self.observer.follow(before, first)
        elif len(tensors_of(self.observer)) == len(before):
            later = first
        else:
            # Code that asks whether statistics are there behaves in two ways; both are traced.
            later = self._shadowed(before, value, valid)
        after = {
            name: (
                later[name]
                if later[name] is first[name] or self._merged_start(name, tensor.dtype) is not None
                else torch.where(is_first, first[name], later[name])
            )
            for name, tensor in before.items()
        }
        if valid is None:
            return after
        # A batch of nothing but padding changes nothing.
        return {name: torch.where(valid.any(), after[name], before[name]) for name in before}

    @property
    def measures_row_groups(self) -> bool:
        """Whether all groups of a value can be measured at once."""
        if not isinstance(self.observer, MeasuringObserver) or not self.measures:
            return False
        return self.observer.measures_row_groups(of_input=self.slot.watches_input)

    def after_row_groups(
        self, before: Tensors, seen: torch.Tensor, value: torch.Tensor, groups: RowGroups
    ) -> Tensors:
        """Compute the statistics of each part after a value from those before it.

        Statistics have a first dimension of groups. A group without tokens keeps its own.

        :param seen: how many values each part had before
        """
        assert isinstance(self.observer, MeasuringObserver)
        measured = (
            self.observer.measure_input_row_groups(value, groups)
            if self.slot.watches_input
            else self.observer.measure_row_groups(self._flat(value), groups)
        )
        later = self.observer.follow(before, measured)
        is_first, has_tokens = seen == 0, groups.counts() > 0
        after = {}
        for name, own in before.items():
            new = torch.where(beside(is_first, own), measured[name], later[name])
            after[name] = torch.where(beside(has_tokens, own), new, own)
        return after

    def first(
        self, before: Tensors, value: torch.Tensor, valid: torch.Tensor | None = None
    ) -> Tensors:
        """Compute the statistics after a first value."""
        if self.measures:
            return self.measure(value, valid)
        start = {name: before[name] for name in tensors_of(self.observer)}
        return self._shadowed(start, value, valid)

    def later(
        self, before: Tensors, value: torch.Tensor, valid: torch.Tensor | None = None
    ) -> Tensors:
        """Compute the statistics after a value that is not the first."""
        if isinstance(self.observer, MeasuringObserver) and self.measures:
            return self.observer.follow(before, self.measure(value, valid))
        return self._shadowed(before, value, valid)

    def take_in(self, observer: Observer, value: torch.Tensor, mask: torch.Tensor | None) -> None:
        """Let an observer with statistics of its own see a value."""
        self._take_in(observer, value, self.valid(value, mask))

    def _shadowed(
        self,
        statistics: Mapping[str, torch.Tensor],
        value: torch.Tensor,
        valid: torch.Tensor | None,
    ) -> Tensors:
        return run_on_shadow(
            self.observer, statistics, lambda shadow: self._take_in(shadow, value, valid)
        )

    def _take_in(self, observer: Observer, value: torch.Tensor, valid: torch.Tensor | None) -> None:
        if not self.slot.watches_input:
            flat = self._flat(value)
            if valid is None:
                observer.update_statistics_from_observed(flat)
            else:
                observer.update_statistics_from_valid(flat, valid)
        elif valid is None:
            observer.observe_input(value)
        else:
            observer.observe_valid_input(value.reshape(-1, value.size(-1)), valid)

    def _flat(self, value: torch.Tensor) -> torch.Tensor:
        return flatten_for_calibration(value, self.observer.base_name, self.observer.args)


def _measures(cls: type[Observer], *, of_input: bool) -> bool:
    """Whether an observer takes in values by measuring and merging, and in no other way."""
    if not issubclass(cls, MeasuringObserver):
        return False
    methods = (
        ("observe_input", "observe_valid_input")
        if of_input
        else ("update_statistics_from_observed", "update_statistics_from_valid")
    )
    return all(
        getattr(cls, method) is getattr(MeasuringObserver, method)
        for method in (*methods, "_take_in")
    )


def _specs(tensors: Tensors) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(name, tuple(tensor.shape), tensor.dtype, tensor.device)
        for name, tensor in sorted(tensors.items())
    )
