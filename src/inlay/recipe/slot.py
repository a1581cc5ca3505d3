"""Slots: values of a model that are quantized, or watched so that others can be."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from compressed_tensors.quantization import DynamicType, QuantizationArgs, QuantizationStrategy

from inlay.observers import (
    ChannelRangeObserver,
    HeldOutHessianObserver,
    HessianObserver,
    MeasuringObserver,
    Observer,
    default_observer,
)

__all__ = ["BASE_NAMES", "Gathers", "Slot", "channels_of", "make_observer"]

# Ports of a module: the places where values pass that can be quantized.
BASE_NAMES = ("weight", "input", "output", "q", "k", "v")


class Gathers(str, Enum):
    """What is gathered at a port.

    A range quantizes the value that passes. Everything else is requested at an input by those who
    need it to quantize something: an observer of weights, equalization, compensation.
    """

    RANGE = "range"
    IMPORTANCE = "importance"  # how much each input channel of a weight matters, for its observer
    CHANNELS = "channels"  # how large the channels are, for equalization
    HESSIAN = "hessian"  # xᵀx, for the compensation of rounding errors
    HELD_OUT = "held_out_hessian"  # the same of some tokens, to choose the damping


# Those whose observer is always the same. That of the importance is the weight's own.
_OBSERVERS: dict[Gathers, type[MeasuringObserver]] = {
    Gathers.CHANNELS: ChannelRangeObserver,
    Gathers.HESSIAN: HessianObserver,
    Gathers.HELD_OUT: HeldOutHessianObserver,
}


@dataclass(frozen=True)
class Slot:
    """An observation: a port of a module, and what is gathered there.

    :param base_name: the port, of `BASE_NAMES`
    :param args: how the value is quantized; of the weight, where its importance is gathered
    """

    module: str
    base_name: str
    args: QuantizationArgs = field(hash=False)
    gathers: Gathers = Gathers.RANGE

    @property
    def name(self) -> str:
        return f"{self.module}.{self.key}"

    @property
    def key(self) -> str:
        """The name of the slot among those of its module."""
        is_range = self.gathers is Gathers.RANGE
        return self.base_name if is_range else f"{self.base_name}:{self.gathers.value}"

    @property
    def is_weight(self) -> bool:
        return self.base_name == "weight"

    @property
    def is_attention(self) -> bool:
        return self.base_name in ("q", "k", "v")

    @property
    def is_importance(self) -> bool:
        return self.gathers is Gathers.IMPORTANCE

    @property
    def watches_input(self) -> bool:
        """Whether something other than the range that quantizes an input is gathered there."""
        return self.gathers is not Gathers.RANGE

    @property
    def has_own_observer(self) -> bool:
        """Whether the statistics serve every format."""
        return self.gathers in _OBSERVERS

    @property
    def is_observed(self) -> bool:
        """Whether statistics are needed. Dynamic quantization needs none, except for `local`."""
        return self.has_own_observer or self.args.dynamic is not True

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
        if self.has_own_observer:
            return self.gathers.value
        return str(self.args.observer or default_observer(self._observed_as))

    @property
    def observer_class(self) -> type[Observer]:
        if self.has_own_observer:
            return _OBSERVERS[self.gathers]
        cls: type[Observer] = Observer.get_value_from_registry(self.observer)
        return cls

    def make_observer(self) -> Observer:
        """Create an observer of this slot, which names the slot in errors."""
        if self.has_own_observer:
            # The settings in the arguments are those of the observer that quantizes the value.
            plain = self.args.model_copy(update={"observer": None, "observer_kwargs": {}})
            observer: Observer = _OBSERVERS[self.gathers](base_name="input", args=plain)
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
        return Slot(self.module, "input", self.args, Gathers.IMPORTANCE)

    @property
    def channels(self) -> "Slot":
        """The slot that watches the channels of this input, or of the input of this weight."""
        return Slot(self.module, "input", self.args, Gathers.CHANNELS)

    @property
    def hessian(self) -> "Slot":
        """The slot that gathers the Hessian of this weight from its input."""
        return Slot(self.module, "input", self.args, Gathers.HESSIAN)

    @property
    def held_out_hessian(self) -> "Slot":
        """The slot that gathers the part of the Hessian by which damping is chosen."""
        return Slot(self.module, "input", self.args, Gathers.HELD_OUT)

    @property
    def sees_scaled(self) -> bool:
        """Whether an equalized input has to be observed once its channels are scaled."""
        is_input = self.base_name == "input" and not self.watches_input and self.is_observed
        return is_input and not vars(self.observer_class).get("follows_channels", False)

    def moved_to(self, module: str) -> "Slot":
        """Return the same slot of another module."""
        return replace(self, module=module)


def channels_of(slots: Mapping[str, Slot]) -> Slot:
    """The slot that watches the channels of a Linear's input, from the slots that it has."""
    return (slots["input"] if "input" in slots else slots["weight"]).channels


def make_observer(base_name: str, args: QuantizationArgs) -> Observer:
    """Create the observer that `args` name, or the default one for the base name."""
    observer = Observer.load_from_registry(args.observer, base_name=base_name, args=args)
    assert isinstance(observer, Observer)
    return observer
