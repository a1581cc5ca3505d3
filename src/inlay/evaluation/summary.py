"""Turning a finalized calibration into the data of its report."""

import math
import platform
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal, cast

import torch
from compressed_tensors.quantization.utils import calculate_range
from torch import nn

from inlay._version import __version__
from inlay.calibration import Calibration
from inlay.evaluation.compare import Comparison
from inlay.evaluation.compensated import compensated_weights
from inlay.evaluation.coverage import about_coverage, expert_layers
from inlay.evaluation.distributions import Clip, distribution_of_histogram, distribution_of_weight
from inlay.evaluation.findings import layer_findings, slot_findings, unquantized_findings
from inlay.observers import Observer, QParamsDict
from inlay.recipe import Plan, Slot, format_in_words, left_in_words, recipe_text, scheme_in_words
from inlay.report.data import (
    EqualizedValue,
    Finding,
    LayerError,
    ReportData,
    SlotRecord,
    Stage,
    UnequalizedValue,
)
from inlay.run_record import Agreement, Record, model_name
from inlay.statistics.by_slot import StatisticsBySlot

__all__ = ["report_of", "slot_records"]

_PACKAGES = ("torch", "compressed-tensors", "transformers")
_BINS = 256
_WEIGHT_BINS = 48
# Bins of all slots of a report together: 64 thousand make about a megabyte of the page.
_BINS_IN_ALL = 1 << 16
_FEWEST_BINS = 24

Kind = Literal["weight", "input", "output", "q", "k", "v"]


def report_of(
    calibration: Calibration,
    comparison: Comparison | None = None,
    *,
    record: Record | None = None,
    sizes: tuple[int, int] | None = None,
    slots: tuple[SlotRecord, ...] | None = None,
) -> ReportData:
    """Collect the data of a finalized calibration's report.

    :param comparison: the comparison with the model before, if there was one
    :param record: facts about the run
    :param sizes: bytes of the model before and after; estimated if not given
    :param slots: the records of all slots, if they were made while the weights were at hand
    """
    statistics, model = calibration.statistics, calibration.model
    layers = () if comparison is None else comparison.layers
    assert statistics.qparams is not None
    if slots is None:
        slots = slot_records(calibration, statistics.plan, statistics.qparams)
    slots = _with_errors(slots, layers)
    scheme = scheme_in_words(calibration.recipe.config)
    if calibration.recipe.gptq is not None:
        scheme += ", GPTQ"
    record = record or Record(model=model_name(model), data="")
    graphs = calibration.graphs
    before, after = sizes or _estimated_sizes(calibration)
    return ReportData(
        title=f"{record.model}, {scheme}",
        model=record.model,
        recipe=recipe_text(calibration.recipe),
        scheme=scheme,
        data=record.data or "unknown data",
        samples=record.samples,
        tokens=record.tokens,
        padding_tokens=record.padding_tokens,
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        size_before=before,
        size_after=after,
        versions=_versions(),
        stages=tuple(Stage(name=name, seconds=seconds) for name, seconds in record.stages),
        tracing=tuple(graphs.tracing),
        tiers=tuple(graphs.auto.described()),
        changes=() if comparison is None else comparison.changes,
        layers=layers,
        slots=slots,
        findings=tuple(_findings(record, model, statistics, slots, comparison, graphs.agreement)),
        equalized=tuple(
            EqualizedValue(
                readers=each.group.readers,
                parameters=tuple(producer.parameter for producer in each.group.producers),
                strength=float(each.strength),
                before=each.before,
                after=each.after,
            )
            for each in calibration.equalization.done
        ),
        unequalized=tuple(
            UnequalizedValue(module=module, reason=reason)
            for module, reason in calibration.equalization.refused.items()
        ),
        compensated=tuple(
            compensated_weights(graphs.weights.compensations, statistics.plan.places)
        ),
        experts=tuple(expert_layers(statistics, layers)),
    )


def _findings(
    record: Record,
    model: nn.Module,
    statistics: StatisticsBySlot,
    slots: tuple[SlotRecord, ...],
    comparison: Comparison | None,
    agreement: Agreement | None,
) -> Iterable[Finding]:
    yield from (Finding(severity="warning", text=f"{text}.") for text in record.advice)
    if comparison is not None:
        yield from comparison.findings
        yield from layer_findings(comparison.layers)
    yield from slot_findings(slots, equalized=statistics.plan.recipe.equalize is not None)
    left = [slot for slot in statistics.plan.slots.values() if not _is_quantized(statistics, slot)]
    yield from unquantized_findings(
        without_data=[s.name for s in left if s.base_name != "weight" and not statistics.seen(s)],
        not_finite=[s.name for s in left if s.base_name == "weight" or statistics.seen(s)],
        modules=[
            name
            for name, kind in statistics.plan.kinds.items()
            if kind == "linear" and not statistics.plan.of_module(name)
        ],
    )
    yield from _about_modules_left(statistics.plan)
    yield from about_coverage(statistics)
    yield from _about_comparison(comparison)
    yield from _about_agreement(agreement)
    if any(s.distribution is not None and s.kind in "qkv" and s.scale_count > 1 for s in slots):
        text = "Distributions of queries, keys and values combine all heads."
        yield Finding(severity="note", text=text)


def _about_modules_left(plan: Plan) -> Iterable[Finding]:
    """Report what stays in full precision although the recipe may mean it."""
    for text in left_in_words(plan.modules_left):
        yield Finding(severity="warning", text=f"{text}.")
    left = plan.stacks_left
    for reason in dict.fromkeys(left.values()):
        names = [name for name, own in left.items() if own == reason]
        yield Finding(
            severity="note",
            text=f"The experts of {names[0]} and {len(names) - 1:,} more modules stay in full "
            f"precision: {reason}.",
        )


def _about_comparison(comparison: Comparison | None) -> Iterable[Finding]:
    if comparison is None or not comparison.batches:
        text = (
            "No data was held out from calibration, so nobody knows how much the output changed; "
            "hold some out before relying on the quantized model."
        )
        yield Finding(severity="warning", text=text)
    elif not comparison.changes:
        text = (
            "The model's output holds nothing that could be compared, so nobody knows how much it "
            "changed; compare the two models by a measure of your own."
        )
        yield Finding(severity="warning", text=text)


def _about_agreement(agreement: Agreement | None) -> Iterable[Finding]:
    """Report a traced model that differs from the eager one, or was not compared with it."""
    if agreement is not None and not agreement:
        text = f"{str(agreement)[0].upper()}{str(agreement)[1:]}."
        yield Finding(severity="note" if agreement.unknown else "warning", text=text)


def slot_records(
    calibration: Calibration, plan: Plan, qparams: Mapping[str, QParamsDict]
) -> tuple[SlotRecord, ...]:
    """Make the records of the slots of a plan, or of a part of it, in the order of depth.

    :param plan: the plan of the calibration, or a part of it whose weights are in memory
    """
    return _SlotRecords(calibration, plan, qparams).all()


def _with_errors(
    slots: tuple[SlotRecord, ...], layers: Iterable[LayerError]
) -> tuple[SlotRecord, ...]:
    """Add the errors of layers to the records of their slots."""
    found = {}
    for layer in layers:
        found[f"{layer.module}.weight"] = layer.weight_sqnr_db
        found[f"{layer.module}.input"] = layer.input_sqnr_db
    return tuple(replace(slot, sqnr_db=found.get(slot.name)) for slot in slots)


class _SlotRecords:
    """A maker of the records of slots."""

    def __init__(
        self, calibration: Calibration, plan: Plan, qparams: Mapping[str, QParamsDict]
    ) -> None:
        statistics = self._statistics = calibration.statistics
        self._qparams = qparams
        self._weights = calibration.graphs.weights
        self._slots = sorted(plan.slots.values(), key=lambda s: plan.places[s.module])
        share = _BINS_IN_ALL // max(1, len(statistics.plan.slots))
        self._bins = max(_FEWEST_BINS, min(_BINS, share))
        # Slots that share their statistics share one range and one picture.
        self._known: dict[str, dict[str, Any]] = {}

    def all(self) -> tuple[SlotRecord, ...]:
        return tuple(self._record(slot) for slot in self._slots)

    def _record(self, slot: Slot) -> SlotRecord:
        qparams = self._qparams.get(slot.name)
        scales = _scales(slot, qparams)
        clip = _clip(slot, qparams)
        is_weight = slot.base_name == "weight"
        found = self._of_weight(slot, clip) if is_weight else self._of_activation(slot, clip)
        words = format_in_words(slot.args, slot.base_name)
        if not slot.is_quantized(self._qparams):
            words += ", left in full precision"
        return SlotRecord(
            name=slot.name,
            module=slot.module,
            kind=cast(Kind, slot.base_name),
            observer=_observer_name(slot),
            format=words,
            scale_count=0 if scales is None else scales.numel(),
            scale_min=None if scales is None else float(scales.min()),
            scale_max=None if scales is None else float(scales.max()),
            tokens=self._tokens(slot),
            **found,
        )

    def _of_weight(self, slot: Slot, clip: Clip) -> dict[str, Any]:
        weight = self._weights.plain(self._statistics.plan.weights[slot.module]).detach()
        low, high = (float(value) for value in weight.aminmax())
        picture = distribution_of_weight(weight, clip, bins=min(_WEIGHT_BINS, self._bins))
        return {"low": low, "high": high, "distribution": picture}

    def _of_activation(self, slot: Slot, clip: Clip) -> dict[str, Any]:
        if not slot.is_observed or not self._statistics.seen(slot):
            return {}
        owner = next(iter(self._statistics.shared_with(slot)), slot).name
        if owner not in self._known:
            observer = self._statistics.observer(slot)
            self._known[owner] = self._of_observer(observer, clip)
        return self._known[owner]

    def _of_observer(self, observer: Observer, clip: Clip) -> dict[str, Any]:
        if not (hasattr(observer, "min_vals") and hasattr(observer, "max_vals")):
            return {}
        lows, highs = observer.min_vals.cpu(), observer.max_vals.cpu()
        found: dict[str, Any] = {"low": float(lows.min()), "high": float(highs.max())}
        if not all(map(math.isfinite, found.values())):
            return found
        histogram = observer.histogram
        if histogram is not None:
            picture = distribution_of_histogram(histogram.cpu(), clip, bins=self._bins)
            found["distribution"] = picture
        return found

    def _tokens(self, slot: Slot) -> int | None:
        if slot.base_name == "weight" or not slot.is_observed:
            return None
        return self._statistics.tokens(slot)


def _is_quantized(statistics: StatisticsBySlot, slot: Slot) -> bool:
    assert statistics.qparams is not None
    return slot.is_quantized(statistics.qparams)


def _observer_name(slot: Slot) -> str:
    if not slot.is_observed:
        return "none"
    return slot.observer


def _scales(slot: Slot, qparams: QParamsDict | None) -> torch.Tensor | None:
    """Return the factors of quantized numbers, or None if they are computed at run time."""
    if qparams is None or not slot.is_static:
        return None
    scale = qparams["scale"].float()
    global_scale = qparams.get("global_scale")
    return scale if global_scale is None else scale / global_scale.float()


def _clip(slot: Slot, qparams: QParamsDict | None) -> Clip:
    """Return the smallest and the largest value that can be represented, over all scales."""
    scales = _scales(slot, qparams)
    if scales is None or qparams is None:
        return None, None
    lowest, highest = calculate_range(slot.args, scales.device)
    zero_point = qparams["zero_point"].float()
    low, high = ((limit - zero_point) * scales for limit in (lowest, highest))
    return float(low.min()), float(high.max())


def _versions() -> dict[str, str]:
    versions = {"inlay": __version__}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {**versions, "python": platform.python_version()}


def _estimated_sizes(calibration: Calibration) -> tuple[int, int]:
    """Return the bytes of all parameters and buffers, before and after packing the weights."""
    model, plan, weights = calibration.model, calibration.plan, calibration.graphs.weights
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}
    before = after = sum(tensor.nbytes for tensor in tensors.values())
    assert calibration.qparams is not None
    counted = set()
    for slot in plan.weight_slots():
        view = plan.weights[slot.module]
        weight, qparams = weights.original(view), calibration.qparams.get(slot.name)
        is_tied = weights.place(view) in counted
        counted.add(weights.place(view))
        if is_tied or qparams is None:
            continue
        packed = math.ceil(weight.numel() * slot.args.num_bits / 8)
        after += packed - weight.nbytes + qparams["scale"].nbytes
        if not slot.args.symmetric:
            after += qparams["zero_point"].nbytes
    return before, after
