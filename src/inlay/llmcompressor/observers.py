"""Observers of Inlay and of llm-compressor in each other's place."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.registry import standardize_lookup_name
from llmcompressor.modifiers.utils.hooks import HooksMixin
from llmcompressor.observers import Observer as PeerObserver
from llmcompressor.observers import imatrix
from torch import distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from inlay.errors import ConfigurationError
from inlay.observers import MemorylessMinMaxObserver, Observer, QParamsDict
from inlay.recipe import Slot, make_observer
from inlay.statistics.by_slot import StatisticsBySlot

__all__ = [
    "InlayObserver",
    "counterpart",
    "hand_over",
    "input_hook_of",
    "offer_observers",
    "searched_by_inlay",
]

_IMPORTANCE = ("_imatrix_sum", "_imatrix_count")


class InlayObserver(PeerObserver):
    """An observer of Inlay where llm-compressor expects one of its own.

    It observes wherever theirs would, by hooks too, and its qparams are Inlay's.

    :param name: the observer, as it is registered with Inlay
    """

    _stats_attrs: list[str] = []

    def __init__(self, base_name: str, args: QuantizationArgs, *, name: str, **kwargs: Any) -> None:
        super().__init__(base_name, args, **kwargs)
        self.name = name
        self.inner = self._fresh()
        self.input_hook: RemovableHandle | None = None

    def _fresh(self) -> Observer:
        return make_observer(self.base_name, counterpart(self))

    @property
    def has_statistics(self) -> bool:
        return self.inner.has_statistics

    @torch.no_grad()
    def forward(self, observed: torch.Tensor) -> "InlayObserver":
        # A weight may be asked for again by those that share a global scale with it.
        if not (self.is_weight_obs and self.has_statistics):
            self.inner(observed)
        return self

    def update_statistics_from_observed(self, observed: torch.Tensor) -> None:
        self.inner.update_statistics_from_observed(observed)

    def get_statistics(self) -> dict[str, torch.Tensor]:
        """The range, as far as the observer keeps one: what a global scale is computed from."""
        names = ("min_vals", "max_vals")
        return {name: getattr(self.inner, name) for name in names if hasattr(self.inner, name)}

    def get_qparams(self) -> QParamsDict:
        Observer.fuse([self.inner, *self._fused()])
        qparams = self.inner.get_qparams()
        self.delete_statistics()
        return qparams

    def _fused(self) -> Iterator[Observer]:
        """Stand-ins for those that share the global scale, which may not be Inlay's."""
        _, *others = self.fusion_handler.get_fused_statistics()
        for statistics in others:
            other = MemorylessMinMaxObserver(self.base_name, self.inner.args)
            for name, value in statistics.items():
                setattr(other, name, value)
            yield other

    def delete_statistics(self, check_fused: bool = True) -> None:
        if check_fused:
            super().delete_statistics()
        else:
            self.inner = self._fresh()

    def sync_activation_stats(self) -> list[dist.Work]:
        return self.inner.sync_activation_stats()

    def attach(self, module: nn.Module) -> None:
        if self.is_weight_obs and self.inner.observes_input and hasattr(module, "in_features"):
            self.input_hook = module.register_forward_pre_hook(self._observe_input)

    def detach(self, module: nn.Module) -> None:
        if self.input_hook is not None:
            self.input_hook.remove()
            self.input_hook = None

    @torch.no_grad()
    def _observe_input(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if not HooksMixin._HOOKS_DISABLED:
            self.inner.observe_input(args[0])


def input_hook_of(observer: PeerObserver) -> RemovableHandle | None:
    """The hook by which a weight observer sees the inputs of its module, if it looks at them."""
    if isinstance(observer, InlayObserver):
        return observer.input_hook
    return observer._imatrix_hook if isinstance(observer, imatrix.IMatrixMSEObserver) else None


def offer_observers() -> None:
    """Register those of Inlay's observers with llm-compressor whose names it does not know."""
    known = {*PeerObserver.registered_names(), *PeerObserver.registered_aliases()}
    for name in Observer.registered_names():
        if name not in known:
            PeerObserver.register_value(partial(InlayObserver, name=name), name=name)


def counterpart(observer: PeerObserver) -> QuantizationArgs:
    """The arguments that make Inlay observe as an observer of llm-compressor's registry does.

    :raises ConfigurationError: if Inlay has no such observer, or not with these settings
    """
    if isinstance(observer, InlayObserver):
        return observer.args.model_copy(update={"observer": observer.name})
    name = _built_in_name(type(observer))
    if name is not None:
        # Read settings from attributes: the recipe has only those that differ from defaults.
        kwargs = {
            kwarg.name: getattr(observer, kwarg.attribute or kwarg.name)
            for kwarg in Observer.get_value_from_registry(name)._kwargs
        }
        args = observer.args.model_copy(update={"observer": name, "observer_kwargs": kwargs})
    else:
        args = observer.args
        if not _is_registered(args.observer):
            raise ConfigurationError(
                f"Inlay does not know the observer {type(observer).__name__}; register it with "
                "inlay.Observer too"
            )
    make_observer(observer.base_name, args)  # refuses settings out of range
    return args


def _built_in_name(peer: type) -> str | None:
    """Return the name of an observer of llm-compressor's own, if Inlay has its counterpart."""
    for name in PeerObserver.registered_names():
        if PeerObserver.get_value_from_registry(name) is peer and _is_registered(name):
            own = Observer.get_value_from_registry(name)
            modules = peer.__module__.split(".")[0], own.__module__.split(".")[0]
            if modules == ("llmcompressor", "inlay"):
                return str(name).replace("-", "_")
    return None


def _is_registered(name: str | None) -> bool:
    return name is not None and standardize_lookup_name(name) in Observer.registered_names()


def hand_over(statistics: StatisticsBySlot, slot: Slot, observer: PeerObserver) -> None:
    """Give an observer of llm-compressor what Inlay gathered for a slot."""
    known = statistics.of(slot)
    assert known is not None
    if slot.is_importance:
        target = observer.inner if isinstance(observer, InlayObserver) else observer
        gathered = {} if known.is_empty else known.current().tensors
        for name, tensor in gathered.items():
            setattr(target, name, tensor)
        return
    own = statistics.observer(slot)
    if isinstance(observer, InlayObserver):
        own._unsynced_observations = int(known.seen)  # its weight among ranks
        observer.inner = own
    elif own.has_statistics:
        for name in observer._stats_attrs:
            setattr(observer, name, getattr(own, name))


@contextmanager
def searched_by_inlay(observers: Iterable[PeerObserver]) -> Iterator[None]:
    """Let weight observers of llm-compressor that search for a range use Inlay's search."""
    searching = [o for o in observers if hasattr(o, "grid") and _built_in_name(type(o))]
    try:
        for observer in searching:
            own = make_observer("weight", counterpart(observer))
            observer.update_statistics_from_observed = partial(_search, observer, own)
        yield
    finally:
        for observer in searching:
            vars(observer).pop("update_statistics_from_observed", None)


def _search(observer: PeerObserver, own: Observer, observed: torch.Tensor) -> None:
    for name in _IMPORTANCE:
        if hasattr(observer, name):
            setattr(own, name, getattr(observer, name))
    own.update_statistics_from_observed(observed)
    observer.min_vals, observer.max_vals = own.min_vals, own.max_vals
