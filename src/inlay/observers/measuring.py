"""Observers that measure each value alone, then merge the result into their statistics."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence

import torch

from inlay.observers.base import Observer
from inlay.observers.helpers import flatten_for_calibration
from inlay.ranges.row_groups import RowGroups
from inlay.reductions import MAXIMUM, MINIMUM, SUM, Reduction, reduction_of

__all__ = ["MeasuringObserver", "Tensors"]

Tensors = dict[str, torch.Tensor]

_IN_ORDER: dict[Reduction, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    MINIMUM: torch.min,
    MAXIMUM: torch.max,
    SUM: torch.add,
}


class MeasuringObserver(Observer):
    """An observer that measures each value alone and merges the result into its statistics.

    A subclass implements `measure`. The operations of `_act_sync_dict` merge its results; a
    statistic without an operation is that of the last value. A subclass that merges in another
    way, such as a moving average, overrides `follow`.
    """

    @abstractmethod
    def measure(self, observed: torch.Tensor, valid: torch.Tensor | None = None) -> Tensors:
        """Compute the statistics of a value alone, without changing the observer.

        :param observed: value of shape (num_observations, *qparam_shape, group_size)
        :param valid: which observations count, of shape (num_observations,); None if all do
        """

    def measure_input(self, x: torch.Tensor, valid: torch.Tensor | None = None) -> Tensors:
        """Compute the statistics of an input of the module. Implement it to observe inputs.

        :param x: of shape (..., features)
        :param valid: which rows count, of shape (rows,); None if all do
        """
        raise NotImplementedError

    def measure_row_groups(self, observed: torch.Tensor, groups: RowGroups) -> Tensors:
        """Compute the statistics of each row group of a value, along a first dimension.

        What it gives for a group without observations is ignored. If the class that implements
        `measure` does not implement this too, the groups are measured one after another.
        """
        raise NotImplementedError

    def measure_input_row_groups(self, x: torch.Tensor, groups: RowGroups) -> Tensors:
        """Compute the statistics of each row group of an input, along a first dimension.

        :param x: of shape (rows, features)
        """
        raise NotImplementedError

    @classmethod
    def measures_row_groups(cls, *, of_input: bool = False) -> bool:
        """Tell whether all groups of a value can be measured at once, exactly as one by one."""
        whole = "measure_input" if of_input else "measure"
        for base in cls.__mro__:
            if f"{whole}_row_groups" in vars(base):
                return base is not MeasuringObserver
            if whole in vars(base):  # a subclass that measures otherwise
                return False
        return False

    @classmethod
    def measure_weights(
        cls, observers: Sequence["MeasuringObserver"], observed: torch.Tensor
    ) -> Tensors:
        """Compute the statistics of several weights at once, each for an observer of its own.

        :param observed: of shape (weights, *qparam_shape, group_size)
        :return: the statistics, along a first dimension of weights
        """
        raise NotImplementedError

    @classmethod
    @torch.no_grad()
    def observe_weights(
        cls, observers: Sequence["MeasuringObserver"], weights: torch.Tensor
    ) -> None:
        """Let observers of one class with equal arguments see a weight each, all at once.

        :param weights: of shape (observers, rows, columns)
        """
        args = observers[0].args
        flat = torch.func.vmap(lambda weight: flatten_for_calibration(weight, "weight", args))
        measured = cls.measure_weights(observers, flat(weights).squeeze(1))
        for number, observer in enumerate(observers):
            observer._take_in({name: values[number] for name, values in measured.items()})
            observer._unsynced_observations += 1

    @classmethod
    def measures_weights(cls) -> bool:
        """Tell whether several weights can be measured at once, exactly as one by one."""
        for base in cls.__mro__:
            if "measure_weights" in vars(base):
                return base is not MeasuringObserver
            if "measure" in vars(base):  # a subclass that measures otherwise
                return False
        return False

    def follow(self, before: Mapping[str, torch.Tensor], measured: Tensors) -> Tensors:
        """Compute the statistics after one more value from those before it."""
        return {name: self._after(name, before[name], value) for name, value in measured.items()}

    def _after(self, name: str, before: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        reduction = self.reduction(name)
        return value if reduction is None else _IN_ORDER[reduction](value, before)

    @classmethod
    def reduction(cls, name: str) -> Reduction | None:
        """Return how a statistic merges over sources; None if it is that of the last value only."""
        operation = cls._act_sync_dict.get(name)
        return None if operation is None else reduction_of(operation, f"{cls.__name__}.{name}")

    def update_statistics_from_observed(self, observed: torch.Tensor) -> None:
        self._take_in(self.measure(observed))

    def update_statistics_from_valid(self, observed: torch.Tensor, valid: torch.Tensor) -> None:
        self._take_in(self.measure(observed, valid))

    def observe_input(self, x: torch.Tensor) -> None:
        self._take_in(self.measure_input(x))

    def observe_valid_input(self, x: torch.Tensor, valid: torch.Tensor) -> None:
        self._take_in(self.measure_input(x, valid))

    def _take_in(self, measured: Tensors) -> None:
        before = {name: getattr(self, name, None) for name in measured}
        known = {name: value for name, value in before.items() if value is not None}
        after = self.follow(known, measured) if len(known) == len(measured) else measured
        for name, value in after.items():
            setattr(self, name, value)
