"""The pipeline that calibrates the modifiers of a recipe by Inlay."""

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from functools import partial
from typing import Any

import torch
from compressed_tensors.offload import get_execution_device
from compressed_tensors.utils import match_named_modules, patch_attr
from llmcompressor.core import LifecycleCallbacks, active_session
from llmcompressor.modifiers import Modifier
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.pipelines import CalibrationPipeline
from llmcompressor.pytorch.utils.helpers import tensors_to_device
from llmcompressor.utils.helpers import DisableQuantization, calibration_forward_context
from torch import nn
from tqdm import tqdm

from inlay.calibration import Calibration
from inlay.errors import ConfigurationError
from inlay.llmcompressor.fallback import problem_with, problem_with_model
from inlay.llmcompressor.gptq import compensate_by, settings_of
from inlay.llmcompressor.observers import (
    hand_over,
    input_hook_of,
    offer_observers,
    searched_by_inlay,
)
from inlay.llmcompressor.recipe import Attached, attached_observers, recipe_of
from inlay.llmcompressor.tracing import traceable
from inlay.recipe import Plan, Recipe, Slot

__all__ = ["InlayPipeline", "register_pipeline"]

Batches = Iterable[Mapping[str, Any]]


class InlayPipeline(CalibrationPipeline):
    """Calibrates with observers inside the graph of the model, and leaves the rest as it is.

    Qparams are those of the `basic` pipeline. Modifiers that need more than statistics run in the
    pipeline that they would have without this one; a warning says which and why.

    :param count_padding: whether padding counts, as it does in llm-compressor's own pipelines
    :param options: further options of `inlay.Calibration`, such as `compiler`
    """

    def __init__(self, *, count_padding: bool = True, **options: Any) -> None:
        self.options = {"count_padding": count_padding, **options}

    def __call__(self, model: nn.Module, dataloader: Batches | None, dataset_args: Any) -> None:
        """Run all modifiers of the session's recipe, in their order."""
        offer_observers()
        recipe = active_session().lifecycle.recipe
        problems = {id(modifier): problem_with(modifier) for modifier in recipe.modifiers}
        with patch_attr(recipe, "modifiers", recipe.modifiers):
            for modifiers in _epochs(model, recipe.modifiers, problems):
                recipe.modifiers = modifiers
                problem = problems[id(modifiers[0])] or problem_with_model(model)
                if problem is None:
                    self._calibrate(model, modifiers, dataloader)
                else:
                    _fall_back(model, modifiers, dataloader, dataset_args, problem)

    def _calibrate(
        self, model: nn.Module, modifiers: list[Modifier], batches: Batches | None
    ) -> None:
        LifecycleCallbacks.calibration_start()
        attached, gptq = attached_observers(model), settings_of(modifiers)
        gathering = [one for one in attached if one.gathers_from is not None]
        calibration = None
        if gathering or gptq is not None:
            recipe = recipe_of(model, attached, gptq)
            calibration = self._gather(model, modifiers, recipe, gathering, _required(batches))
        weights = [one.observer for one in attached if one.base_name == "weight"]
        session = active_session().lifecycle.recipe
        with searched_by_inlay(weights):
            for modifier in modifiers:
                # Each gets its own modules: given all, it would observe those of the others anew.
                with patch_attr(session, "modifiers", [modifier]):
                    LifecycleCallbacks.sequential_epoch_end(_targeted(model, modifier))
                if calibration is not None and isinstance(modifier, GPTQModifier):
                    compensate_by(calibration, modifier, model)
        LifecycleCallbacks.calibration_end()

    def _gather(
        self,
        model: nn.Module,
        modifiers: Sequence[Modifier],
        recipe: Recipe,
        gathering: Sequence[Attached],
        batches: Batches,
    ) -> Calibration:
        """Run the batches, and give observers of llm-compressor the statistics."""
        hooks = {hook for modifier in modifiers for hook in modifier._hooks}
        hooks |= {hook for one in gathering if (hook := input_hook_of(one.observer)) is not None}
        states = any(one.base_name in ("q", "k", "v") for one in gathering)
        with traceable(model, hooks, states=states):
            calibration = Calibration(model, recipe, **self.options)
            if isinstance(batches, Sized):
                calibration.graphs.expect(len(batches))
            for batch in _watched(model, batches):
                calibration.observe(**batch)
                if _has_padding(batch):
                    calibration.graphs.require_padding_left_out()
        slots = {slot.name: slot for slot in _gathering_slots(calibration.plan)}
        statistics = calibration.statistics
        seen = {name for name, slot in slots.items() if statistics.of(slot) is not None}
        outside = [str(one.gathers_from) for one in gathering if one.gathers_from not in seen]
        if outside:
            _observe_by_hooks(model, batches, outside)
        for one in gathering:
            if one.gathers_from in seen:
                hand_over(statistics, slots[one.gathers_from], one.observer)
        return calibration


def register_pipeline(name: str, *, count_padding: bool = True, **options: Any) -> None:
    """Offer the pipeline to `oneshot(pipeline=name)`, with options of its own.

    :param count_padding: whether padding counts, as it does in llm-compressor's own pipelines
    :param options: further options of `inlay.Calibration`, such as `compiler`
    """
    make = partial(InlayPipeline, count_padding=count_padding, **options)
    try:
        CalibrationPipeline.register_value(make, name=name)
    except (KeyError, RuntimeError) as error:
        raise ConfigurationError(
            f"there is a pipeline {name!r} already; register this one under another name"
        ) from error


def _epochs(
    model: nn.Module, modifiers: Sequence[Modifier], problems: Mapping[int, str | None]
) -> list[list[Modifier]]:
    """Modifiers that run together: those for Inlay that follow each other, any other alone.

    Of those that target the same module, each takes its observers off before the next one starts.
    """
    epochs: list[list[Modifier]] = []
    modules: set[nn.Module] | None = None  # of the last epoch, if others may join it
    for modifier in modifiers:
        is_alone = problems[id(modifier)] or isinstance(modifier, GPTQModifier)
        own = None if is_alone else set(_targeted(model, modifier))
        if own is None or modules is None or not own.isdisjoint(modules):
            epochs.append([modifier])
            modules = own
        else:
            epochs[-1].append(modifier)
            modules |= own
    return epochs


def _targeted(model: nn.Module, modifier: Modifier) -> list[nn.Module]:
    found = match_named_modules(model, modifier.resolved_targets, modifier.ignore)
    return [module for _, module in found]


def _fall_back(
    model: nn.Module,
    modifiers: Sequence[Modifier],
    batches: Batches | None,
    dataset_args: Any,
    problem: str,
) -> None:
    """Run modifiers, one after another, in the pipelines that they ask for."""
    recipe = active_session().lifecycle.recipe
    for modifier in modifiers:
        pipeline = CalibrationPipeline.from_modifiers([modifier])
        warnings.warn(
            f"{type(modifier).__name__} runs in {type(pipeline).__name__} and not in Inlay: "
            f"{problem}",
            stacklevel=6,  # who called oneshot
        )
        with patch_attr(recipe, "modifiers", [modifier]):
            pipeline(model, batches, dataset_args)


def _required(batches: Batches | None) -> Batches:
    if batches is None:
        raise ConfigurationError(
            "the recipe quantizes activations, or weighs weights by them, and needs data for that; "
            "give oneshot a dataset"
        )
    return batches


def _watched(model: nn.Module, batches: Batches) -> Iterator[dict[str, Any]]:
    """Batches on the device of the model, with the bar and the count of llm-compressor."""
    state, device = active_session().state, get_execution_device(model)
    for index, batch in enumerate(tqdm(batches, desc="Calibrating")):
        state.current_batch_idx = index
        yield tensors_to_device(batch, device)


def _has_padding(batch: Mapping[str, Any]) -> bool:
    mask = batch.get("attention_mask")
    return isinstance(mask, torch.Tensor) and not bool(mask.all())


def _gathering_slots(plan: Plan) -> Iterator[Slot]:
    yield from plan.activation_slots()
    yield from plan.watching_slots()


def _observe_by_hooks(model: nn.Module, batches: Batches, slots: Sequence[str]) -> None:
    """Let llm-compressor observe what no graph of the model shows to Inlay."""
    more = f" and {len(slots) - 3} more" if len(slots) > 3 else ""
    warnings.warn(
        f"the traced model does not show {', '.join(slots[:3])}{more}; hooks observe them, in a "
        "second run over the data",
        stacklevel=8,  # who called oneshot
    )
    with calibration_forward_context(model), DisableQuantization(model):
        for batch in _watched(model, batches):
            model(**batch)
