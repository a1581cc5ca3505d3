"""Round weights so that the rounding errors of their columns compensate each other."""

import warnings
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from inlay.collectives import each_by_one_rank
from inlay.compensation.damping import choose_damping
from inlay.compensation.gptq import compensate as solve
from inlay.compensation.grid import Grid
from inlay.compensation.settings import GPTQ
from inlay.errors import StatisticsError
from inlay.observers.hessian import whole
from inlay.progress import watched
from inlay.ranges.args import key_of
from inlay.recipe import Slot
from inlay.steps.finalizing import Finalizing
from inlay.steps.weights import Compensation

__all__ = ["compensate"]

Found = dict[str, torch.Tensor]  # the weight of a reader, and the figures of its compensation

# Numbers in the tensors of one batch of layers: 1 GB in float32. A constant, so that batches, and
# with them the last bits of results, do not depend on the memory that happens to be free.
_AT_ONCE = 2**28
_NAMED = 5  # modules that an error names


def compensate(state: Finalizing) -> None:
    """Put the weights on their grids by GPTQ, if the recipe asks for it.

    Layers that read one value share its Hessian and are solved as one, and layers of equal shape
    are solved together. Over ranks, each layer is solved by one of them.
    """
    gptq = state.plan.recipe.gptq
    if gptq is None:
        return
    layers = {layer.name: layer for layer in _layers(state, gptq)}

    def solved(names: Sequence[str]) -> Iterable[tuple[str, tuple[Found, ...]]]:
        batches = list(_batches([layers[name] for name in names]))
        for batch in watched(batches, "compensating", show=state.progress):
            yield from _solved(state, batch, gptq)

    found = each_by_one_rank(
        {name: layer.cost for name, layer in layers.items()},
        solved,
        device_of=lambda name: layers[name].hessian.device,
    )
    for name, layer in layers.items():
        for reader, own in zip(layer.readers, found[name], strict=True):
            figures = {key: float(own[key]) for key in ("signal", "before", "after", "damping")}
            gain = Compensation(**figures, failed=bool(own["failed"]))
            for slot in reader.slots:
                state.weights.compensated[slot.module] = own["weight"]
                state.weights.compensations[slot.module] = gain
    _warn_of_failures(state.weights.compensations)
    if not gptq.keep_hessians:
        slots = list(state.plan.weight_slots())
        state.statistics.drop(slot.hessian for slot in slots)
        state.statistics.drop(slot.held_out_hessian for slot in slots)


@dataclass(frozen=True, eq=False)
class _Reader:
    """A weight and its slots: several, if modules share it."""

    weight: torch.Tensor
    slots: list[Slot]

    @property
    def slot(self) -> Slot:
        return self.slots[0]

    @property
    def rows(self) -> int:
        return len(self.weight)


@dataclass(frozen=True, eq=False, kw_only=True)
class _Layer:
    """Weights that read one value, and are rounded to grids of one format."""

    readers: list[_Reader]
    hessian: torch.Tensor
    held_out: torch.Tensor | None  # a part of the Hessian, if it chooses the damping

    @property
    def name(self) -> str:
        return self.readers[0].slot.name

    @property
    def kind(self) -> tuple[Any, ...]:
        """Equal for layers that can be solved together."""
        weight = self.readers[0].weight
        return (
            key_of(self.readers[0].slot.args),
            weight.dtype,
            weight.device,
            self.rows,
            self.columns,
        )

    @property
    def rows(self) -> int:
        return sum(reader.rows for reader in self.readers)

    @property
    def columns(self) -> int:
        return len(self.hessian)

    @property
    def size(self) -> int:
        """Numbers in the tensors that solving the layer takes, about."""
        return 4 * self.columns**2 + 6 * self.rows * self.columns

    @property
    def cost(self) -> float:
        """How long solving takes, in any unit."""
        return float(self.columns**2 * (self.columns + self.rows))


def _layers(state: Finalizing, gptq: GPTQ) -> Iterator[_Layer]:
    """Yield the layers to compensate, with readers of the same value together."""
    layers: dict[tuple[Any, ...], _Layer] = {}
    for reader in _readers(state, gptq):
        hessian = _hessian(state, [slot.hessian for slot in reader.slots])
        held_out = None
        if gptq.chooses_damping:
            held_out = _hessian(state, [slot.held_out_hessian for slot in reader.slots])
        key = id(hessian), key_of(reader.slot.args), reader.weight.dtype
        layer = layers.setdefault(key, _Layer(readers=[], hessian=hessian, held_out=held_out))
        layer.readers.append(reader)
    yield from layers.values()


def _readers(state: Finalizing, gptq: GPTQ) -> list[_Reader]:
    """Find the weights to compensate.

    :raises StatisticsError: if the input of one was not observed
    """
    slots = [
        slot
        for slot in state.plan.weight_slots()
        if slot.name in state.qparams and state.plan.compensates(slot.module)
    ]
    unseen = [slot for slot in slots if state.statistics.tokens(slot.hessian) == 0]
    if unseen and "unobserved" not in state.accept:
        raise StatisticsError(
            f"GPTQ has no data for {_named([slot.module for slot in unseen])}. Run batches that "
            "reach them, ignore them in the recipe, or round them to nearest with "
            'finalize(accept={"unobserved"}). Stored statistics serve GPTQ only if they were saved '
            "with keep_hessians=True"
        )
    left_out = {slot.name for slot in unseen}
    if gptq.chooses_damping and not all(
        state.statistics.tokens(slot.held_out_hessian)
        for slot in slots
        if slot.name not in left_out
    ):
        raise StatisticsError(
            "the stored statistics have no held-out tokens to choose the damping by. Set damping "
            "to a number, or calibrate anew"
        )
    readers: dict[tuple[Hashable, str], _Reader] = {}
    for slot in slots:
        if slot.name in left_out:
            continue
        view = state.plan.weights[slot.module]
        key = state.weights.place(view), key_of(slot.args)
        if key not in readers:
            readers[key] = _Reader(state.weights.plain(view).detach(), [])
        readers[key].slots.append(slot)
    return list(readers.values())


def _hessian(state: Finalizing, slots: Iterable[Slot]) -> torch.Tensor:
    """Return the Hessian that slots have gathered; several, if modules share a weight."""
    found = {}
    for slot in slots:
        known = state.statistics.of(slot)
        assert known is not None, "weights without data are not compensated"
        found[id(known.tensors["hessian"])] = known.tensors["hessian"]
    hessians = list(found.values())
    return hessians[0] if len(hessians) == 1 else torch.stack(hessians).sum(0)


def _batches(layers: Iterable[_Layer]) -> Iterator[list[_Layer]]:
    """Yield layers of equal kind together, as many as memory takes."""
    alike: dict[tuple[Any, ...], list[_Layer]] = {}
    for layer in layers:
        alike.setdefault(layer.kind, []).append(layer)
    for of_kind in alike.values():
        count = max(1, _AT_ONCE // of_kind[0].size)
        yield from (of_kind[start : start + count] for start in range(0, len(of_kind), count))


def _solved(
    state: Finalizing, layers: Sequence[_Layer], gptq: GPTQ
) -> Iterator[tuple[str, tuple[Found, ...]]]:
    """Solve layers of one kind; yield what was found for each of their readers."""
    weights = torch.stack([torch.cat([own.weight for own in each.readers]) for each in layers])
    hessians = torch.stack([whole(layer.hessian) for layer in layers])
    grid = Grid.joined([_grid(state, layer) for layer in layers], rows=False)
    damping: Any = gptq.damping
    if gptq.chooses_damping:
        held_out = [whole(layer.held_out) for layer in layers if layer.held_out is not None]
        damping = choose_damping(weights, hessians, torch.stack(held_out), grid)
    solution = solve(weights, hessians, grid, damping=damping)
    for number, layer in enumerate(layers):
        found: list[Found] = []
        start = 0
        for reader in layer.readers:
            rows = slice(start, start + reader.rows)
            found.append(
                {
                    "weight": solution.weights[number, rows],
                    "signal": solution.signal[number, rows].sum(),
                    "before": solution.before[number, rows].sum(),
                    "after": solution.after[number, rows].sum(),
                    "damping": solution.damping[number],
                    "failed": solution.failed[number],
                }
            )
            start += reader.rows
        yield layer.name, tuple(found)


def _grid(state: Finalizing, layer: _Layer) -> Grid:
    grids = []
    for reader in layer.readers:
        qparams: Mapping[str, Any] = state.qparams[reader.slot.name]
        stacked = {k: v.unsqueeze(0) for k, v in qparams.items() if isinstance(v, torch.Tensor)}
        shape = reader.rows, layer.columns
        grids.append(Grid.of(reader.slot.args, shape, **stacked))
    return Grid.joined(grids, rows=True)


def _named(modules: Sequence[str]) -> str:
    more = f" and {len(modules) - _NAMED} more" if len(modules) > _NAMED else ""
    return ", ".join(modules[:_NAMED]) + more


def _warn_of_failures(found: Mapping[str, Compensation]) -> None:
    failed = [module for module, each in found.items() if each.failed]
    if failed:
        warnings.warn(
            f"GPTQ could not factorize the Hessian of {_named(failed)}. These weights are rounded "
            "to nearest; check their inputs for NaN and Inf",
            stacklevel=2,
        )
