"""Compute scales and zero points from statistics and weights."""

import warnings
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence

import torch

from inlay.collectives import each_by_one_rank
from inlay.errors import StatisticsError
from inlay.observers import Observer, QParamsDict, fusion_problem, has_global_scale
from inlay.progress import watched
from inlay.ranges.args import key_of
from inlay.recipe import Slot
from inlay.statistics.value import merge
from inlay.steps.finalizing import Finalizing
from inlay.steps.observe_weights import observe_weights

__all__ = ["choose_ranges"]

# Searching a histogram of 2 ** 16 bins takes about as long as a weight of 2 ** 22 elements.
_COST_OF_STATISTICS = 64.0
_NAMED = 5  # weights that a warning names


def choose_ranges(state: Finalizing) -> None:
    """Compute the qparams of all slots, each range on one rank."""
    state.qparams.update(_Ranges(state).qparams())


class _Ranges:
    def __init__(self, state: Finalizing) -> None:
        self.statistics, self.plan = state.statistics, state.plan
        self.weights, self.accept = state.weights, state.accept
        self.progress = state.progress
        self._fused: list[list[str]] = []  # weights that share a global scale

    def _weight_of(self, slot: Slot) -> torch.Tensor:
        return self.weights.plain(self.plan.weights[slot.module])

    def qparams(self) -> dict[str, QParamsDict]:
        activations, weights = self._activation_observers(), self._weight_observers()
        observers = {**activations, **weights}
        first_of = self._first_sharing(observers)
        distinct = {name: observers[name] for name in dict.fromkeys(first_of.values())}

        def answers_of(names: Sequence[str]) -> Iterable[tuple[str, QParamsDict | StatisticsError]]:
            self._observe_weights({name: weights[name] for name in names if name in weights})
            own = {name: distinct[name] for name in names}
            return watched(_answers(own), "computing scales", total=len(own), show=self.progress)

        answers = each_by_one_rank(
            {name: self._cost(name) for name in distinct},
            answers_of,
            together=[*self._tied(weights).values(), *self._fused],
            device_of=self._device_of,
        )
        found: dict[str, QParamsDict] = {}
        broken: list[tuple[bool, str]] = []  # a weight may have broken all that follows it
        for name, first in first_of.items():
            answer = answers[first]
            if not isinstance(answer, StatisticsError):
                found[name] = answer
                continue
            if name == first:
                broken.append((not self.plan.slots[name].is_weight, str(answer)))
                continue
            # Statistics that several slots share are broken in each, under its own name.
            broken += [
                (not self.plan.slots[name].is_weight, str(own))
                for _, own in _answers({name: observers[name]})
            ]
        if broken and "not_finite" not in self.accept:
            raise StatisticsError(
                f"{len(broken)} slots have no usable statistics: "
                + "; ".join(text for _, text in sorted(broken, key=lambda each: each[0]))
                + '. finalize(accept={"not_finite"}) leaves them in full precision'
            )
        self._warn_of_zeros(weights)
        return found

    def _warn_of_zeros(self, names: Collection[str]) -> None:
        """Warn of weights without any value, as of a model whose weights were never loaded."""
        zeros = [name for name in names if not _has_values(self._weight_of(self.plan.slots[name]))]
        if zeros:
            more = f" and {len(zeros) - _NAMED:,} more" if len(zeros) > _NAMED else ""
            warnings.warn(
                f"{len(zeros):,} of {len(names):,} quantized weights are all zeros: "
                f"{', '.join(zeros[:_NAMED])}{more}. Check that the weights of the model were "
                "loaded, or ignore these modules",
                stacklevel=2,
            )

    def _first_sharing(self, names: Iterable[str]) -> dict[str, str]:
        """Map each slot to the first that shares its statistics, and so what follows from them."""
        known: dict[int, str] = {}
        first_of = {}
        for name in names:
            shared = self.statistics.of(self.plan.slots[name])
            first_of[name] = name if shared is None else known.setdefault(id(shared), name)
        return first_of

    def _activation_observers(self) -> dict[str, Observer]:
        slots = list(self.plan.activation_slots())
        observers = {slot.name: self.statistics.observer(slot) for slot in slots}
        # Slots of stacks have no data only where a whole layer has none, and that is accepted.
        unobserved = [name for name, observer in observers.items() if not observer.has_statistics]
        if unobserved and "unobserved" not in self.accept:
            raise StatisticsError(
                f"{len(unobserved)} of {len(slots)} slots saw no data: {', '.join(unobserved)}. "
                "Run batches that reach them, ignore their modules in the recipe, or leave them in "
                'full precision with finalize(accept={"unobserved"})'
                + _hint_for_attention(unobserved)
                + self._hint_for_products(unobserved)
            )
        return {name: o for name, o in observers.items() if name not in set(unobserved)}

    def _hint_for_products(self, unobserved: Iterable[str]) -> str:
        modules = dict.fromkeys(self.plan.slots[name].module for name in unobserved)
        ran = [name for name in modules if name in self.statistics.unrecognised]
        if not ran:
            return ""
        return (
            f". {', '.join(ran)} ran, but no product with the whole weight was recognised; "
            "products are recognised in F.linear, and in matrix products with a transposed weight"
        )

    def _weight_observers(self) -> dict[str, Observer]:
        """Return observers that have not seen their weights yet; a shared weight has one."""
        observers: dict[str, Observer] = {}
        for names in self._tied(slot.name for slot in self.plan.weight_slots()).values():
            slots = [self.plan.slots[name] for name in names]
            observers.update(dict.fromkeys(names, self._weight_observer(slots)))
        self._fuse(observers)
        return observers

    def _tied(self, names: Iterable[str]) -> dict[tuple[Hashable, str], list[str]]:
        """Group slots by the weight that they share, which is quantized once."""
        tied: dict[tuple[Hashable, str], list[str]] = {}
        for name in names:
            slot = self.plan.slots[name]
            place = self.weights.place(self.plan.weights[slot.module])
            tied.setdefault((place, key_of(slot.args)), []).append(name)
        return tied

    def _observe_weights(self, observers: Mapping[str, Observer]) -> None:
        views = self.plan.weights
        own = {views[self.plan.slots[name].module]: each for name, each in observers.items()}
        observe_weights(own, self.weights.plain, self.progress)

    def _cost(self, name: str) -> float:
        """How long a range takes to be found, roughly, in elements of a weight."""
        slot = self.plan.slots[name]
        if slot.base_name == "weight":
            return float(self._weight_of(slot).numel())
        known = self.statistics.of(slot)
        return (
            _COST_OF_STATISTICS * sum(t.numel() for t in known.tensors.values()) if known else 0.0
        )

    def _device_of(self, name: str) -> torch.device:
        slot = self.plan.slots[name]
        if slot.base_name == "weight":
            return self._weight_of(slot).device
        known = self.statistics.of(slot)
        assert known is not None, "a slot that was observed has statistics"
        return known.seen.device

    def _weight_observer(self, slots: Sequence[Slot]) -> Observer:
        """Make the observer of a weight, which knows the inputs of all modules that share it."""
        observer = slots[0].make_observer()
        inputs = (slot.importance for slot in slots)
        known = (self.statistics.of(one) for one in inputs if one is not None)
        seen = [each for each in known if each is not None and not each.is_empty]
        if seen:
            for name, tensor in merge(*seen).tensors.items():
                setattr(observer, name, tensor.clone())
        return observer

    def _fuse(self, observers: dict[str, Observer]) -> None:
        """Link the observers of layers that share a global scale."""
        refused = []
        for parent, members in self.plan.fused_groups():
            group = {member: observers.get(f"{parent}{member}.weight") for member in members}
            formats = {m: None if o is None else o.args for m, o in group.items()}
            if not any(map(has_global_scale, formats.values())):
                continue
            problem = fusion_problem(formats)
            if problem is not None:
                refused.append(f"{parent}{{{problem}}}")
            else:
                Observer.fuse(observer for observer in group.values() if observer is not None)
                self._fused.append([f"{parent}{member}.weight" for member in members])
        if refused and "unfused" not in self.accept:
            raise StatisticsError(
                "layers that are served as one need one global scale, and so the same scheme: "
                + "; ".join(refused)
                + '. Target or ignore all of them, or use finalize(accept={"unfused"})'
            )


def _has_values(weight: torch.Tensor) -> bool:
    """Whether a weight holds anything but zeros; its first row mostly tells."""
    weight = weight.detach()
    return bool(weight[:1].any()) or bool(weight.any())


def _answers(
    observers: Mapping[str, Observer],
) -> Iterator[tuple[str, QParamsDict | StatisticsError]]:
    """Ask observers of one class with the same arguments together, which may take less time."""
    alike: dict[tuple[type[Observer], str], list[str]] = {}
    for name, observer in observers.items():
        alike.setdefault((type(observer), key_of(observer.args)), []).append(name)
    for (cls, _), names in alike.items():
        yield from zip(names, cls.get_qparams_of(observers[name] for name in names), strict=True)


def _hint_for_attention(unobserved: Iterable[str]) -> str:
    if not any(name.rpartition(".")[2] in ("q", "k", "v") for name in unobserved):
        return ""
    return (
        ". Attention is observed where scaled_dot_product_attention computes it; load the model "
        'with attn_implementation="sdpa"'
    )
