"""What the ranks are asked to do. In a module of its own, so that they can import it."""

from typing import Any

import numpy as np
import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import distributed as dist

from inlay.observers import Observer, sync_observers

PER_TENSOR = QuantizationArgs(num_bits=8, strategy="tensor")
PER_HEAD = QuantizationArgs(num_bits=8, strategy="attn_head")

Batches = list[np.ndarray]


class CountingObserver(Observer):
    """Statistics that are neither a float nor of the shape of a scale."""

    _act_sync_dict = {"bins": dist.ReduceOp.SUM, "smallest": dist.ReduceOp.MIN}

    @property
    def has_statistics(self) -> bool:
        return hasattr(self, "bins")

    def update_statistics_from_observed(self, observed: torch.Tensor) -> None:
        bins = torch.histc(observed, bins=8, min=-4, max=4).to(torch.int64)
        smallest = observed.round().to(torch.int32).amin()
        if self.has_statistics:
            bins, smallest = bins + self.bins, torch.minimum(smallest, self.smallest)
        self.bins, self.smallest = bins, smallest


def make(name: str) -> Observer:
    if name == "counting":
        return CountingObserver("input", PER_TENSOR)
    base_name, args = ("k", PER_HEAD) if name.endswith("@k") else ("input", PER_TENSOR)
    return Observer.load_from_registry(name.removesuffix("@k"), base_name=base_name, args=args)


def statistics(observer: Observer) -> dict[str, Any]:
    values = {name: getattr(observer, name, None) for name in observer._act_sync_dict}
    return {name: None if v is None else v.numpy().copy() for name, v in values.items()}


def observe_and_sync(argument: tuple[list[str], Batches]) -> list[dict[str, Any]]:
    """One observer of each name sees all batches of this rank, then all are merged together."""
    names, batches = argument
    observers = feed(names, batches)
    sync_observers(observers)
    return [statistics(observer) for observer in observers]


def observe_and_sync_each(argument: tuple[list[str], Batches]) -> list[dict[str, Any]]:
    """The same through the documented method of each observer, with its handles."""
    names, batches = argument
    observers = feed(names, batches)
    for observer in observers:
        for work in observer.sync_activation_stats():
            assert isinstance(work, dist.Work)
            work.wait()
            work.wait()  # a second time does no harm
    return [statistics(observer) for observer in observers]


def observe_in_rounds(argument: tuple[str, list[Batches]]) -> dict[str, Any]:
    """Merge after every round, as a pipeline that synchronizes between batches does."""
    name, rounds = argument
    observer = make(name)
    for batches in rounds:
        for batch in batches:
            observer(torch.from_numpy(batch))
        sync_observers([observer])
    sync_observers([observer])
    return statistics(observer)


def gather_importance(batches: Batches) -> dict[str, Any]:
    module = torch.nn.Linear(4, 2)
    observer = Observer.load_from_registry("imatrix_mse", base_name="weight", args=PER_TENSOR)
    if batches:  # a rank may not even have got as far as attaching
        observer.attach(module)
    for batch in batches:
        module(torch.from_numpy(batch))
    sync_observers([observer])
    sync_observers([observer])
    return statistics(observer)


def count_collectives(argument: tuple[list[str], Batches]) -> int:
    names, batches = argument
    observers = feed(names, batches)
    original, calls = dist.all_reduce, []

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return original(*args, **kwargs)

    dist.all_reduce = counted
    try:
        sync_observers(observers)
    finally:
        dist.all_reduce = original
    return len(calls)


def feed(names: list[str], batches: Batches) -> list[Observer]:
    observers = [make(name) for name in names]
    for observer in observers:
        for batch in batches:
            value = torch.from_numpy(batch)
            observer(
                value.unflatten(-1, (2, -1)).transpose(1, 2) if observer.base_name == "k" else value
            )
    return observers


def half_precision(batches: Batches) -> list[float]:
    observers = [make("static_minmax"), make("minmax")]
    for observer in observers:
        for batch in batches:
            observer(torch.from_numpy(batch).to(torch.bfloat16))
    sync_observers(observers)
    assert all(o.min_vals.dtype == torch.bfloat16 for o in observers)
    return [float(value) for o in observers for value in (o.min_vals, o.max_vals)]


def unknown_operation(_: None) -> None:
    class Product(CountingObserver):
        _act_sync_dict = {"bins": dist.ReduceOp.PRODUCT}

    sync_observers([Product("input", PER_TENSOR)])


def two_layers() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 4, bias=False)
    )


def calibrate(argument: tuple[str, Batches, float | None]) -> dict[str, Any]:
    """Calibrate on the batches of this rank; what is stored afterwards, and the scales."""
    from inlay import Calibration, Recipe
    from inlay.statistics.data_seen import DataSeen

    observer, batches, equalize = argument
    weights = {"observer": "imatrix_mse", "observer_kwargs": {"strict": True}}
    recipe = Recipe.from_preset(
        "W8A8_STATIC", inputs={"observer": observer}, weights=weights, equalize=equalize
    )
    calibration = Calibration(two_layers(), recipe, compiler="eager")
    for batch in batches:
        calibration.observe(torch.from_numpy(batch))
    if calibration.needs_second_run:
        calibration.equalize()
        for batch in batches:
            calibration.observe(torch.from_numpy(batch))
    seen = DataSeen(batches=len(batches), samples=2 * len(batches), tokens=7)
    calibration.statistics.data_seen = seen
    qparams = calibration.finalize()
    stored = calibration.stored()
    return {
        "scales": {name: values["scale"].numpy() for name, values in qparams.items()},
        "equalized": [str(each) for each in calibration.equalization.done],
        "stored": {
            name: {key: tensor.numpy() for key, tensor in known.tensors.items()}
            | {"seen": int(known.seen), "tokens": int(known.tokens)}
            for name, known in stored.slots.items()
        },
        "shown": {
            slot.name: calibration.statistics.tokens(slot)
            for slot in calibration.plan.activation_slots()
        },
        "data": (stored.data_seen.batches, stored.data_seen.samples, stored.data_seen.tokens),
    }


def finalize_twice(batches: Batches) -> tuple[str, int]:
    """A first attempt that is refused, then one that accepts: nothing is counted twice."""
    from inlay import Calibration, Recipe, StatisticsError

    model = torch.nn.ModuleDict({"used": torch.nn.Linear(4, 4), "unused": torch.nn.Linear(4, 4)})
    model.forward = lambda x: model["used"](x)  # type: ignore[method-assign]
    recipe = Recipe.from_preset("W8A8_STATIC", inputs={"observer": "histogram"})
    calibration = Calibration(model, recipe, compiler="eager")
    for batch in batches:
        calibration.observe(torch.from_numpy(batch))
    try:
        calibration.finalize()
    except StatisticsError as error:
        message = str(error)
    calibration.finalize(accept={"unobserved"})
    return message, int(calibration.stored().slots["used.input"].tensors["counts"].sum())
