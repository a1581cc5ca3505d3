"""Let observers see their weights, many of a stack at a time."""

from collections.abc import Callable, Iterator, Mapping

import torch

from inlay.model import Weight
from inlay.observers import MeasuringObserver, Observer
from inlay.progress import watched

__all__ = ["observe_weights"]

# Elements of the weights that are observed at once: 64 MB in float32, and several times that while
# they are searched.
_TOGETHER = 2**24


def observe_weights(
    observers: Mapping[Weight, Observer],
    read: Callable[[Weight], torch.Tensor],
    progress: bool | None = None,
) -> None:
    """Let each observer see its weight.

    :param observers: by weight; modules that share a weight share the observer
    :param read: returns the data of a weight
    """
    distinct: dict[int, Weight] = {}
    for view, observer in observers.items():
        distinct.setdefault(id(observer), view)
    chunks = list(_chunks({view: observers[view] for view in distinct.values()}))
    for views in watched(chunks, "observing weights", show=progress):
        own = [observers[view] for view in views]
        measuring = [observer for observer in own if isinstance(observer, MeasuringObserver)]
        if views[0].index is not None and _measures_many(own[0]):
            stacked = torch.stack([read(view).detach() for view in views])
            type(measuring[0]).observe_weights(measuring, stacked)
        else:
            for observer, view in zip(own, views, strict=True):
                observer(read(view).detach())


def _chunks(observers: Mapping[Weight, Observer]) -> Iterator[list[Weight]]:
    """Yield weights that are observed together: those of a stack, as many as memory takes.

    Not all of equal shape: a search over many at once can differ in the last bits.
    """
    alike: dict[object, list[Weight]] = {}
    for view, observer in observers.items():
        is_alone = view.index is None or not _measures_many(observer)
        key = view if is_alone else (view.parameter, view.rows)
        alike.setdefault(key, []).append(view)
    for views in alike.values():
        size = max(1, _TOGETHER // max(1, views[0].numel))
        yield from (views[start : start + size] for start in range(0, len(views), size))


def _measures_many(observer: Observer) -> bool:
    return isinstance(observer, MeasuringObserver) and observer.measures_weights()
