"""Slots: values of a model that are quantized, or watched so that others can be."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from compressed_tensors.quantization import DynamicType, QuantizationArgs, QuantizationStrategy

from inlay.observers import (
    ChannelRangeObserver,
    Observer,
    StaticMinMaxObserver,
    default_observer,
)

__all__ = ["BASE_NAMES", "CHANNELS", "IMPORTANCE", "Slot", "channels_of", "make_observer"]

# Parts of a module that can be quantized.
BASE_NAMES = ("weight", "input", "output", "q", "k", "v")
# Inputs watched only to learn how much the input channels of a weight matter.
IMPORTANCE = "importance"
# Inputs watched only to learn how large their channels are.
CHANNELS = "channels"


@dataclass(frozen=True)
class Slot:
    """An observed part of a module: one of `BASE_NAMES`, `IMPORTANCE` or `CHANNELS`.

    :param args: how the value is quantized; for an importance slot, how the weight is, and
        for a channels slot, how the input is
    """

    module: str
    base_name: str
    args: QuantizationArgs = field(hash=False)

    @property
    def name(self) -> str:
        return f"{self.module}.{self.base_name}"

    @property
    def is_weight(self) -> bool:
        return self.base_name == "weight"

    @property
    def is_attention(self) -> bool:
        return self.base_name in ("q", "k", "v")

    @property
    def is_importance(self) -> bool:
        return self.base_name == IMPORTANCE

    @property
    def is_channels(self) -> bool:
        return self.base_name == CHANNELS

    @property
    def watches_input(self) -> bool:
        """Whether the slot is about the input of its module without quantizing it."""
        return self.is_importance or self.is_channels

    @property
    def is_observed(self) -> bool:
        """Whether statistics are needed. Dynamic quantization needs none, except for `local`."""
        return self.is_channels or self.args.dynamic is not True

    @property
    def is_static(self) -> bool:
        """Whether scale and zero point are computed beforehand, not only the global scale."""
        return self.args.dynamic not in (True, DynamicType.LOCAL)

    @property
    def needed_qparams(self) -> tuple[str, ...]:
        """The qparams a checkpoint must hold; others are computed when the model is served."""
        needed = []
        if self.is_observed and self.args.strategy == QuantizationStrategy.TENSOR_GROUP:
            needed.append("global_scale")
        if self.is_static:
            needed.append("scale")
            if not self.args.symmetric:
                needed.append("zero_point")
        return tuple(needed)

    @property
    def used_qparams(self) -> tuple[str, ...]:
        """The qparams that quantizing a value reads; others are computed from the value."""
        if not self.is_observed:
            return ()
        return ("scale", "zero_point", "global_scale") if self.is_static else ("global_scale",)

    def used_of(self, qparams: Mapping[str, Any]) -> dict[str, Any]:
        """The qparams of this slot that quantizing a value takes as they are, by name."""
        return {key: qparams[self.name].get(key) for key in self.used_qparams}

    def is_quantized(self, qparams: Mapping[str, Any]) -> bool:
        """Tell whether a finalized model quantizes this slot: it has qparams, or needs none."""
        return not self.watches_input and (self.name in qparams or not self.is_observed)

    @property
    def observer(self) -> str:
        """The name of the observer: the recipe's, or the default for this base name."""
        if self.is_channels:
            return "channel ranges"
        return str(self.args.observer or default_observer(self._observed_as))

    @property
    def observer_class(self) -> type[Observer]:
        if self.is_channels:
            return ChannelRangeObserver
        cls: type[Observer] = Observer.get_value_from_registry(self.observer)
        return cls

    def make_observer(self) -> Observer:
        """Create an observer of this slot, which names the slot in errors."""
        if self.is_channels:
            # The settings in the arguments are those of the observer that quantizes the input.
            plain = self.args.model_copy(update={"observer": None, "observer_kwargs": {}})
            observer: Observer = ChannelRangeObserver(base_name="input", args=plain)
        else:
            observer = make_observer(self._observed_as, self.args)
        observer.slot = self.name
        return observer

    @property
    def _observed_as(self) -> str:
        return "weight" if self.is_importance else self.base_name

    @property
    def importance(self) -> "Slot | None":
        """The slot that watches the module's input for this weight, if its observer needs it."""
        if not self.is_weight or not self.observer_class.observes_input:
            return None
        return Slot(self.module, IMPORTANCE, self.args)

    @property
    def channels(self) -> "Slot":
        """The slot that watches the channels of this input, or of the input of this weight."""
        return Slot(self.module, CHANNELS, self.args)

    @property
    def sees_scaled(self) -> bool:
        """Whether an equalized input has to be observed once its channels are scaled.

        The range of `static_minmax` follows from the ranges of channels; others have to see it.
        """
        is_input = self.base_name == "input" and self.is_observed
        return is_input and self.observer_class is not StaticMinMaxObserver

    def moved_to(self, module: str) -> "Slot":
        """Return the same slot of another module."""
        return Slot(module, self.base_name, self.args)


def channels_of(slots: Mapping[str, Slot]) -> Slot:
    """The slot that watches the channels of a Linear's input, from the slots that it has."""
    return (slots["input"] if "input" in slots else slots["weight"]).channels


def make_observer(base_name: str, args: QuantizationArgs) -> Observer:
    """Create the observer that `args` name, or the default one for the base name."""
    observer = Observer.load_from_registry(args.observer, base_name=base_name, args=args)
    assert isinstance(observer, Observer)
    return observer
