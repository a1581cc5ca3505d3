"""Eager observers on hooks: what the graphs of a calibration are held against."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from inlay.checking.alone import RowsAlone, named, sequences_of, valid_of
from inlay.checking.linear_experts import LinearExperts
from inlay.observers import Observer
from inlay.recipe import Plan, Slot

__all__ = ["Hooks", "Seen"]


class Seen:
    """An eager observer of a slot, and how many values it has seen."""

    def __init__(self, slot: Slot) -> None:
        self.slot = slot
        self.observer: Observer = slot.make_observer()
        self.values = 0

    def take_in(self, value: Any) -> None:
        if isinstance(value, torch.Tensor) and value.numel():
            self.values += 1
            if self.slot.watches_input:
                self.observer.observe_input(value)
            else:
                self.observer(value)


class Hooks:
    """Eager observers of the inputs and outputs of modules, while a model runs without a graph.

    Experts that a model keeps in one parameter run a second time beside it, each as the Linear
    modules that a recipe speaks of.

    :param model: the model of the plan, or a copy of it
    :ivar alone: what the sequences of the next batch give alone, for its padding to be left out
    :ivar records: whether batches are such sequences, whose values are kept and not observed
    :ivar seen: what was observed, by slot
    """

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        self.model, self.plan = model, plan
        self.alone: RowsAlone | None = None
        self.records = False
        self.seen: dict[str, Seen] = {}
        self._handles: list[RemovableHandle] = []
        for name, module in model.named_modules():
            self._observe(name, module)
        for name in dict.fromkeys(stack.holder for stack in plan.stacks.values()):
            self._observe_experts(name, LinearExperts(model.get_submodule(name), plan, name))

    def _observe(self, name: str, module: nn.Module) -> None:
        """Observe a module of the plan, which may share its weight with others."""
        slots = self.plan.of_module(name) if name in self.plan.kinds else {}
        watches = self.plan.watches(name).values() if slots else ()
        for slot in (slots.get("input"), *watches):
            if slot is not None and slot.is_observed:
                hook = partial(self._see_input, self._seen(slot))
                self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        output = slots.get("output")
        if output is not None and output.is_observed:
            hook = partial(self._see_output, self._seen(output))
            self._handles.append(module.register_forward_hook(hook))

    def _observe_experts(self, name: str, experts: LinearExperts) -> None:
        for own, module in experts.linears.items():
            self._observe(own, module)
        run = partial(self._run_beside, experts)
        experts_of_model = self.model.get_submodule(name)
        self._handles.append(experts_of_model.register_forward_pre_hook(run, with_kwargs=True))

    def _seen(self, slot: Slot) -> Seen:
        return self.seen.setdefault(slot.name, Seen(slot))

    def _see_input(
        self, seen: Seen, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        self._take_in(seen, args[0] if args else kwargs.get("input"))

    def _see_output(self, seen: Seen, module: nn.Module, args: Any, output: Any) -> None:
        self._take_in(seen, output)

    def _run_beside(
        self, experts: LinearExperts, module: nn.Module, args: Any, kwargs: Mapping[str, Any]
    ) -> None:
        experts(*args, **kwargs)

    def _take_in(self, seen: Seen, value: Any) -> None:
        if self.alone is None or not isinstance(value, torch.Tensor):
            seen.take_in(value)
        elif self.records:
            self.alone.add(seen.slot.name, value)
        else:
            seen.take_in(self.alone.kept(seen.slot.name, value))

    def run_without_padding(self, batch: Any) -> None:
        """Run a padded batch and observe only the rows of its sequences.

        :raises ComputedOtherwiseError: if the model computes something else for them alone
        """
        whole = named(self.model, batch)
        if valid_of(whole) is None and valid_of(whole, "decoder_") is None:
            self.model(**whole)
            return
        self.alone, self.records = RowsAlone(), True
        try:
            for sequence in sequences_of(whole):
                self.alone.begin()
                self.model(**sequence)
            self.alone.begin()
            self.records = False
            self.model(**whole)
        finally:
            self.alone, self.records = None, False

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    @classmethod
    @contextmanager
    def on(cls, model: nn.Module, plan: Plan) -> Iterator["Hooks"]:
        """Observe a model for as long as the context lasts."""
        hooks = cls(model, plan)
        try:
            with torch.no_grad():
                yield hooks
        finally:
            hooks.remove()
