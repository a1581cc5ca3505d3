"""Check that Inlay gets a model right: against hooks, against compressed-tensors, and from disk."""

import copy
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationType
from torch import nn

from inlay.calibration import Calibration
from inlay.calibration.tracing.running import evaluating
from inlay.calibration.tracing.strategies import call
from inlay.checking.agreement import (
    CLOSE,
    differ_by,
    require_close,
    require_statistics,
    rounding_of,
    tensors_in,
)
from inlay.checking.hooks import Hooks, Seen
from inlay.checking.padding import has_padding, padding_agrees, sequences_agree
from inlay.checking.references import equalized_copy, quantized_copy, read_back
from inlay.errors import CheckError
from inlay.recipe import Plan, Recipe

__all__ = ["CheckedCalibration", "check_calibration"]


@dataclass(frozen=True, kw_only=True)
class CheckedCalibration:
    """What was checked, in sentences, and what could not be, with the reason."""

    done: tuple[str, ...]
    left_out: tuple[str, ...] = ()


def check_calibration(
    model: nn.Module,
    recipe: Recipe,
    batches: Sequence[Any],
    *,
    compiler: str = "eager",
    tolerance: float = 0.0,
) -> CheckedCalibration:
    """Calibrate a model and hold everything that comes of it against something simpler.

    Statistics are held against eager observers on hooks, the finalized graph against the forward of
    compressed-tensors, and a checkpoint, if the model is one of transformers, against the graph.
    Experts that the model keeps in one parameter run one by one there, as Linear modules.

    If batches have padding, it is counted at first. A second calibration leaves it out, and is held
    against hooks that are shown tokens alone, and against sequences one by one. If the recipe
    equalizes, a copy of the model with scaled parameters has to compute what the model does, and
    what was observed or derived of equalized inputs is held against hooks on the copy.

    The model runs in evaluation mode. Afterwards each module has its own mode again.

    :param batches: keyword arguments of the model by name, or positional ones
    :param compiler: the backend of `torch.compile` to check; one that rounds needs a tolerance
    :param tolerance: how far statistics may differ, relatively; by default not at all, but by
        rounding for experts, which a graph multiplies together
    :raises CheckError: if anything differs, or a slot that hooks see is missed by the graph
    """
    with evaluating(model):
        return _check(model, recipe, batches, compiler, tolerance)


def _check(
    model: nn.Module, recipe: Recipe, batches: Sequence[Any], compiler: str, tolerance: float
) -> CheckedCalibration:
    make = partial(Calibration, model, recipe, compiler=compiler, progress=False)
    calibration = make(count_padding=True)
    torch.compiler.reset()
    # A copy, as a model may keep something of the batches it has seen.
    hooked = _observed_by_hooks(copy.deepcopy(model), calibration, batches)
    for batch in batches:
        call(calibration.observe, batch)
    if calibration.needs_second_run:
        calibration.equalize()
        for batch in batches:
            call(calibration.observe, batch)
    scaled = _scaled_inputs(calibration)
    plain = {name: seen for name, seen in hooked.items() if name not in scaled}
    results = [(_statistics_agree(calibration, plain, tolerance), True)]
    if has_padding(model, batches):
        padded = make()
        results.append(padding_agrees(padded, batches, tolerance))
        if results[-1][1]:
            results.append(sequences_agree(padded, batches, make, tolerance))
    calibration.finalize(accept=("unobserved",))  # modules that these batches do not reach
    if recipe.equalize is not None:
        results.append((_equalized_agrees(calibration, batches, scaled, tolerance), True))
    called = {name for name, seen in hooked.items() if seen.values}
    reference = _reference(calibration, called)  # of the model as it is before the graph runs
    with torch.no_grad():
        graph = torch.compile(model, backend=calibration.backend)
        found = tensors_in(call(graph, batches[0]))
    try:
        results.append(_forward_agrees(calibration, reference, batches[0], found))
    except CheckError:
        apart = _apart_when_traced(model, batches[0])
        if apart <= CLOSE or isinstance(reference, str):
            raise
        results.append((f"the graph: Dynamo's own trace of the model is {apart:.2g} off", False))
        with torch.no_grad():
            found = tensors_in(call(reference, batches[0]))
    results.append(_checkpoint_agrees(calibration, batches[0], found))
    return CheckedCalibration(
        done=tuple(text for text, is_done in results if is_done),
        left_out=tuple(text for text, is_done in results if not is_done),
    )


def _observed_by_hooks(
    model: nn.Module, calibration: Calibration, batches: Sequence[Any]
) -> dict[str, Seen]:
    """What eager observers see in the model of a calibration, or in a copy of it."""
    with Hooks.on(model, calibration.plan) as hooks:
        for batch in batches:
            call(model, batch)
    return hooks.seen


def _scaled_inputs(calibration: Calibration) -> set[str]:
    """Names of the slots that were observed only once their inputs were equalized."""
    readers = {
        name for group in calibration.equalization.collected.groups for name in group.readers
    }
    slots = (slot for slot in calibration.plan.slots.values() if slot.sees_scaled)
    return {slot.name for slot in slots if slot.module in readers}


def _equalized_agrees(
    calibration: Calibration, batches: Sequence[Any], scaled: Collection[str], tolerance: float
) -> str:
    """Hold the equalized model against the model, and statistics against hooks on it."""
    equalized = equalized_copy(calibration)
    with torch.no_grad():
        found, expected = (
            tensors_in(call(model, batches[0])) for model in (equalized, calibration.model)
        )
    rounding = rounding_of(equalized)
    require_close("the model", found, expected, by="the equalized one", close=max(CLOSE, rounding))
    hooked = _observed_by_hooks(equalized, calibration, batches)
    statistics = calibration.statistics
    compared = 0
    for group in (each.group for each in calibration.equalization.done):
        for slot in (calibration.plan.of_module(reader)["input"] for reader in group.readers):
            seen = hooked.get(slot.name)
            known = statistics.of(slot)
            if seen is None or not seen.values or known is None:
                continue
            # A range that follows from those of channels is rounded once more.
            far = tolerance if slot.name in scaled else max(tolerance, rounding)
            require_statistics(slot.name, known.observer(), seen.observer, far)
            compared += 1
    return (
        f"the equalized model computes what the model does, and {compared} equalized inputs have "
        "the statistics that eager observers see in it"
    )


def _statistics_agree(
    calibration: Calibration, hooked: Mapping[str, Seen], tolerance: float
) -> str:
    """Hold the statistics of the graph against those of eager observers."""
    snapshot = calibration.statistics.snapshot()
    missed = [name for name, seen in hooked.items() if seen.values and name not in snapshot]
    if missed:
        raise CheckError(
            f"the graph misses what hooks see at {', '.join(missed)}; look at explain() for why"
        )
    if calibration.plan.stacks:  # a graph multiplies experts together, which rounds otherwise
        tolerance = max(tolerance, rounding_of(calibration.model))
    compared = 0
    for name, seen in hooked.items():
        if not seen.values:
            continue
        found = snapshot[name]
        if int(found.seen) != seen.values:
            raise CheckError(
                f"{name} saw {int(found.seen)} values in the graph and {seen.values} by hooks"
            )
        require_statistics(name, found.observer(), seen.observer, tolerance)
        compared += 1
    alone = sum(1 for name in snapshot if not getattr(hooked.get(name), "values", 0))
    more = f"; {alone} others are seen by the graph alone, such as states of attention"
    return f"statistics of {compared} slots are those of eager observers{more if alone else ''}"


def _reference(calibration: Calibration, called: Collection[str]) -> nn.Module | str:
    """The model as compressed-tensors quantizes it, or why that is another one than the graph's.

    :param called: names of the slots that hooks have seen
    """
    plan, qparams = calibration.plan, calibration.qparams
    assert qparams is not None
    if any(slot.is_attention for slot in plan.slots.values()):
        return "which wraps attention only while serving"
    observed = [slot for slot in plan.slots.values() if slot.is_observed and not slot.is_weight]
    missing = [slot.name for slot in observed if slot.name not in qparams]
    if missing:
        return f"as {missing[0]} saw no data"
    uncalled = [slot.module for slot in observed if slot.name not in called]
    if uncalled:
        return f"which does not quantize {uncalled[0]}: it is never called, only its weight is used"
    return quantized_copy(calibration)


def _forward_agrees(
    calibration: Calibration, reference: nn.Module | str, batch: Any, found: list[torch.Tensor]
) -> tuple[str, bool]:
    """Hold the finalized graph against the forward that compressed-tensors gives a model."""
    what = "the forward of compressed-tensors"
    if isinstance(reference, str):
        return f"{what}, {reference}", False
    with torch.no_grad():
        expected = tensors_in(call(reference, batch))
    require_close(what, found, expected, close=_closeness(calibration))
    return "the finalized graph computes what compressed-tensors computes", True


def _apart_when_traced(model: nn.Module, batch: Any) -> float:
    """Return how far Dynamo takes a model from itself, without any pass of Inlay."""
    torch.compiler.reset()
    with torch.no_grad():
        traced = tensors_in(call(torch.compile(model, backend="eager"), batch))
        plain = tensors_in(call(model, batch))
    return max((differ_by(*pair) for pair in zip(traced, plain, strict=True)), default=0.0)


def _closeness(calibration: Calibration) -> float:
    """How close outputs of the graph and of a model with experts one by one have to be.

    Each rounds otherwise, and what lies between two steps of a format is quantized to either.
    """
    return max(CLOSE, rounding_of(calibration.model)) if calibration.plan.stacks else CLOSE


def _loads_experts(plan: Plan) -> bool:
    """Whether transformers runs experts that are quantized like those of the plan.

    It loads packed integers without zero points, and FP8 without quantizing its inputs.
    """
    slots = plan.of_module(next(iter(plan.stacks)))
    args = slots["weight"].args
    return "input" not in slots and bool(args.symmetric) and args.type == QuantizationType.INT


def _checkpoint_agrees(
    calibration: Calibration, batch: Any, found: list[torch.Tensor]
) -> tuple[str, bool]:
    """Write a checkpoint, load it, by transformers where that can be, and hold it to the graph."""
    model: Any = calibration.model
    if not hasattr(model, "save_pretrained"):
        return "a checkpoint, as the model is not one of transformers", False
    by_transformers = not calibration.plan.stacks or _loads_experts(calibration.plan)
    with tempfile.TemporaryDirectory() as folder:
        saved = calibration.save(Path(folder) / "checkpoint", report=False)
        loaded = (
            type(model).from_pretrained(saved, dtype=model.dtype).eval()
            if by_transformers
            else read_back(calibration, saved)
        )
        with torch.no_grad():
            expected = tensors_in(call(loaded, batch))
    what = "the checkpoint, loaded back"
    require_close(what, found, expected, close=_closeness(calibration))
    how = "" if by_transformers else ", by compressed-tensors with experts as Linear modules,"
    return f"the checkpoint loads back{how} and computes what the graph does", True
