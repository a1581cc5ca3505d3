"""The base class of observers, which turn values into statistics and statistics into scales."""

import math
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar, TypedDict

import torch
from compressed_tensors import InternalModule
from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy
from compressed_tensors.quantization.utils import generate_gparam
from compressed_tensors.registry.registry import RegistryMixin
from torch import distributed as dist

from inlay.errors import ConfigurationError, StatisticsError
from inlay.observers.helpers import flatten_for_calibration
from inlay.observers.kwargs import Kwarg, read_kwargs
from inlay.observers.sync import start_sync
from inlay.ranges.float_histogram import Histogram
from inlay.ranges.qparams import qparams_of_range

__all__ = ["MinMaxTuple", "Observer", "QParamsDict", "default_observer", "require_finite"]

MinMaxTuple = tuple[torch.Tensor, torch.Tensor]


def default_observer(base_name: str) -> str:
    """Name the observer of a value whose recipe names none, as in llm-compressor."""
    return "memoryless_minmax" if base_name == "weight" else "minmax"


class QParamsDict(TypedDict, total=False):
    """Parameters that quantize a value."""

    scale: torch.Tensor
    zero_point: torch.Tensor
    global_scale: torch.Tensor | None


class Observer(InternalModule, RegistryMixin):
    """Base class of all observers of weights, activations and attention states.

    A subclass implements `update_statistics_from_observed`. If its statistics are not `min_vals`
    and `max_vals`, it also overrides `get_qparams` and `has_statistics`.

    :param base_name: the part observed: `weight`, `input`, `output`, `q`, `k` or `v`
    :param args: how the observed value will be quantized; never modified
    :param observer_kwargs: settings of the observer, on top of `args.observer_kwargs`
    """

    # Maps statistics to the operations that merge them over ranks; last-batch statistics have none.
    _act_sync_dict: ClassVar[dict[str, Any]] = {}

    # Whether the statistics are the same for every format, so that another one can be chosen later.
    any_format: ClassVar[bool] = False

    # Whether the range of an equalized input follows from the ranges of its channels, so that one
    # run over the data is enough. Not inherited: a subclass may measure something else.
    follows_channels: ClassVar[bool] = False

    # Settings of built-in observers, checked and set as attributes. A user's own observer reads its
    # settings from `self.args.observer_kwargs`.
    _kwargs: ClassVar[tuple[Kwarg, ...]] = ()

    # Whether `observe_input` must see the inputs of the module whose weight is observed.
    observes_input: ClassVar[bool] = False

    base_name: str
    args: QuantizationArgs
    slot: str
    min_vals: torch.Tensor
    max_vals: torch.Tensor

    def __init__(self, base_name: str, args: QuantizationArgs, **observer_kwargs: Any) -> None:
        super().__init__()
        self.base_name = base_name
        self.args = args.model_copy(
            update={"observer_kwargs": {**(args.observer_kwargs or {}), **observer_kwargs}}
        )
        # The name in errors. Callers that know the module's name prepend it.
        self.slot = base_name
        self._fused_observers: set[Observer] = set()
        # Observations since the last synchronization: the weight of this rank in an average.
        self._unsynced_observations = 0
        # Statistics as the last synchronization left them, so that no sum is counted twice.
        self._synced: dict[str, torch.Tensor] = {}
        settings = read_kwargs(
            type(self).__name__,
            self._kwargs,
            self.args.observer_kwargs,
            # A subclass that lists no settings inherits them, and may read others.
            closed="_kwargs" in vars(type(self)),
        )
        for attribute, value in settings.items():
            setattr(self, attribute, value)

    @property
    def has_statistics(self) -> bool:
        return hasattr(self, "min_vals")

    @property
    def histogram(self) -> Histogram | None:
        """Return the distribution of the values observed so far, if the observer keeps it."""
        return None

    @abstractmethod
    def update_statistics_from_observed(self, observed: torch.Tensor) -> None:
        """Update the statistics from one observed value.

        :param observed: value of shape (num_observations, *qparam_shape, group_size)
        """
        raise NotImplementedError

    def update_statistics_from_valid(self, observed: torch.Tensor, valid: torch.Tensor) -> None:
        """Update the statistics from valid observations only, without the padding of a batch.

        This default selects them, which gives a data-dependent shape that no compiled graph can
        have. An observer that leaves out padding there overrides it and keeps the shape.

        :param observed: as for `update_statistics_from_observed`
        :param valid: of shape (num_observations,), at least one of them true
        """
        self.update_statistics_from_observed(observed[valid])

    @torch.no_grad()
    def forward(self, observed: torch.Tensor) -> "Observer":
        """Update the statistics from an observed value. An empty value changes nothing.

        :return: self, for chaining
        """
        if observed.numel() == 0:
            return self
        flat = flatten_for_calibration(observed, self.base_name, self.args)
        self.update_statistics_from_observed(flat)
        self._unsynced_observations += 1
        return self

    @torch.no_grad()
    def get_qparams(self) -> QParamsDict:
        """Compute scale, zero point and, for tensor_group, global scale from the statistics.

        The global scale covers this observer and those fused with it, which must have observed
        their values already. The statistics stay, so this can be called again.
        """
        require_finite(self, ("min_vals", "max_vals"))
        return self._qparams_of(*self._chosen_range(), self.args)

    @classmethod
    def get_qparams_of(
        cls, observers: Iterable["Observer"]
    ) -> Iterator["QParamsDict | StatisticsError"]:
        """Compute the qparams of several observers of this class, each as `get_qparams` does.

        This default asks one after another. An observer that can search the ranges of several at
        once in less time overrides it, and finds the same.

        :return: in the order of the observers, qparams or the error that `get_qparams` would raise
        """
        for observer in observers:
            try:
                yield observer.get_qparams()
            except StatisticsError as error:
                yield error

    @classmethod
    def saved_by_compiling(cls, args: QuantizationArgs) -> float:
        """Return how many nanoseconds compiling saves for each observed element of an activation.

        Estimates on two AVX-512 cores are good enough: they decide what `compiler="auto"` compiles.
        This default is right for observers that read a value once, and leaves others eager.
        """
        return 0.0

    def _chosen_range(self) -> MinMaxTuple:
        """Return the range to quantize: that of the statistics, unless a subclass overrides it."""
        return self.min_vals, self.max_vals

    def _qparams_of(
        self, min_vals: torch.Tensor, max_vals: torch.Tensor, args: QuantizationArgs
    ) -> QParamsDict:
        global_scale = self.get_global_scale()
        scale, zero_point = qparams_of_range(min_vals, max_vals, args, global_scale)
        if not _is_usable(scale):
            raise StatisticsError(
                f"{self.slot}: the range from {float(min_vals.min()):.4g} to "
                f"{float(max_vals.max()):.4g} is too wide for a finite scale in "
                f"{scale.dtype}; observe in a wider dtype, or look for broken values"
            )
        return {"scale": scale, "zero_point": zero_point, "global_scale": global_scale}

    def get_global_scale(self) -> torch.Tensor | None:
        """Compute the scale of scales over this observer and those fused with it, or None."""
        if self.args.strategy != QuantizationStrategy.TENSOR_GROUP:
            return None
        group = [self, *self._fused_observers]
        for observer in group:
            require_finite(observer, ("min_vals", "max_vals"))
        absmax = torch.stack(
            [
                torch.maximum(-o.min_vals.min(), o.max_vals.max()).to(self.min_vals.device)
                for o in group
            ]
        ).max()
        return _as_tensor(generate_gparam(-absmax.reshape(1), absmax.reshape(1)))

    def observe_input(self, x: torch.Tensor) -> None:
        """Update the channel weights of a weight observer from an input of its module."""
        raise NotImplementedError

    def observe_valid_input(self, x: torch.Tensor, valid: torch.Tensor) -> None:
        """Observe only the valid rows of an input; see `update_statistics_from_valid`."""
        self.observe_input(x[valid])

    @classmethod
    def divide_input(
        cls, statistics: Mapping[str, torch.Tensor], scales: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Return statistics of inputs as if their channels had been divided by scales."""
        raise NotImplementedError(
            f"{cls.__name__} cannot weigh the channels of an equalized input; override its method "
            "divide_input, or leave equalize out"
        )

    def sync_activation_stats(self) -> list[dist.Work]:
        """Start merging the statistics over all ranks, by the operations of `_act_sync_dict`.

        Every rank must call it, even one that saw no data: it receives the others' statistics.
        Weights are the same on all ranks and need no merging.

        :return: handles; the statistics are merged once each has been waited for
        """
        return start_sync([self])

    def attach(self, module: torch.nn.Module) -> None:
        """Register the observer's hooks on the module it is attached to, if it has any."""

    def detach(self, module: torch.nn.Module) -> None:
        """Remove the observer's hooks from the module before it is taken from there."""

    @staticmethod
    def fuse(observers: Iterable["Observer"]) -> None:
        """Link observers, and those that they are linked with, to compute one global scale."""
        observers = {each for one in observers for each in (one, *one._fused_observers)}
        for observer in observers:
            observer._fused_observers.update(o for o in observers if o is not observer)

    @classmethod
    def load_from_registry(cls, name: str | None, **constructor_kwargs: Any) -> Any:
        """Create an observer of the class registered as `name`; None means the default one.

        :param constructor_kwargs: `base_name`, `args` and settings of the observer
        """
        if name is None:
            name = default_observer(constructor_kwargs["base_name"])
        return cls.get_value_from_registry(name)(**constructor_kwargs)

    @classmethod
    def get_value_from_registry(cls, name: str) -> Any:
        """Return the observer class registered as `name`; underscores and dashes are the same."""
        # The registry would also import "file.py:Class", but a recipe is data and runs no code.
        try:
            if ":" not in name:
                return super().get_value_from_registry(name)
        except KeyError:
            pass
        known = ", ".join(sorted(n.replace("-", "_") for n in cls.registered_names()))
        raise ConfigurationError(
            f"there is no observer {name!r}. Registered: {known}. Register your own with "
            "@Observer.register(name)"
        )


def require_finite(observer: Observer, statistics: Iterable[str]) -> None:
    """Raise unless the observer has these statistics and all their values are finite."""
    if not observer.has_statistics:
        raise StatisticsError(
            f"{observer.slot}: no statistics yet; call observer(value) on at least one "
            "non-empty tensor before get_qparams()"
        )
    for name in statistics:
        values = getattr(observer, name)
        # A finite sum has finite terms. This is the usual case, and several times as fast.
        if math.isfinite(float(values.sum())):
            continue
        bad = ~torch.isfinite(values)
        if bool(bad.any()):
            where = tuple(bad.nonzero()[0].tolist())
            raise StatisticsError(
                f"{observer.slot}: statistic {name} is not finite in {int(bad.sum())} of "
                f"{values.numel()} places (the first is {float(values[where])} at {where}); the "
                "observed values contained NaN or Inf; find where they come from"
            )


def _is_usable(scale: torch.Tensor) -> bool:
    least, largest = scale.to(torch.float32).aminmax()
    return float(least) > 0 and math.isfinite(float(largest))


def _as_tensor(value: Any) -> torch.Tensor:
    assert isinstance(value, torch.Tensor)
    return value
