"""Rules: how a value is observed, as a function from state to state.

An observer is a class that keeps its statistics in attributes. A graph wants a function. The
functional view sets the state as attributes on a shadow of the observer, lets it take in a value,
and reads the attributes back.
"""

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
from compressed_tensors.quantization.utils import calculate_range

from inlay.errors import StatisticsError
from inlay.observers import Observer, flatten_for_calibration
from inlay.recipe import Slot, make_observer
from inlay.torch_private import allow_real_tensors, fake_mode_of, without_fake_mode

__all__ = ["Rule", "TensorSpec", "tensors_of", "warm_up"]


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
        return tensors_of(self.observer)

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
        return tensors_of(shadow)

    def specs(self, value: torch.Tensor) -> tuple[TensorSpec, ...]:
        """What the state looks like, found by observing a value without data in it.

        Raises whatever the observer raises if it cannot do without data.
        """
        warm_up(self.observer, value.device)
        mode = fake_mode_of(value)
        assert mode is not None, "specs are found with fake tensors"
        with mode, allow_real_tensors(mode), torch.no_grad():
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


def warm_up(observer: Observer, device: torch.device) -> None:
    """Let compressed-tensors cache its ranges with real tensors.

    It remembers them by type, bits and device. Were the first call for a key made while tracing, a
    tensor without data would be remembered, for good.
    """
    with without_fake_mode():
        calculate_range(observer.args, device)


def tensors_of(observer: Observer) -> dict[str, torch.Tensor]:
    """What the observer keeps in tensors, by name."""
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
