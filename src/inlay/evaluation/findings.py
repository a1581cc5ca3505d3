"""Findings: what the reader of a report should know about slots and layers."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from statistics import median_low
from typing import Literal

from inlay.report.data import Distribution, Finding, LayerError, SlotRecord

__all__ = ["layer_findings", "slot_findings", "unquantized_findings"]

# 8 bits have 255 steps. If nearly all values lie within a twentieth of the range, they share a
# dozen steps, fewer than 4 bits would give them without the outliers.
_BULK = 0.999
_BULK_RATIO = 20.0
# Ranges of one kind of slot grow with depth, tenfold at most; massive activations, by hundreds.
_WIDE = 50.0
# The rounding errors of the other slots drown whatever such a narrow slot adds.
_DEAD = 1e-3
# With a tenth of the tokens that others saw, the largest value was likely missed.
_FEW_TOKENS = 0.1
# At 10 dB a third of the amplitude is noise; int4 weights in groups reach about 20 dB.
_LOW_SQNR = 10.0
# Layers of one kind vary by a few dB. 12 dB less than the others are two bits lost.
_SQNR_BEHIND = 12.0
# Fewer slots than this do not show what is usual for their kind.
_ENOUGH = 4
# More cases of one sort become a single finding.
_EACH = 3
_NAMED = 5  # how many modules a list names
_FINER_INPUTS = (
    "Per-token scales, as in dynamic schemes, help most. An observer that clips, such as histogram "
    "or mse, helps only if the outliers do not matter."
)
_FINER_WEIGHTS = (
    "Scales per channel or in groups help most. GPTQ compensates the rounding errors that remain."
)

Severity = Literal["note", "warning"]


@dataclass(frozen=True, kw_only=True)
class _Case:
    """A problem at one slot or layer; the larger `weight` is, the worse."""

    about: str
    text: str
    weight: float


def slot_findings(slots: Sequence[SlotRecord], *, equalized: bool = False) -> list[Finding]:
    """Find zero weights, outliers, nearly dead slots, and slots that saw few tokens.

    :param equalized: whether channels were equalized, as findings about outliers advise otherwise
    """
    usual = _Usual((*_kinds(slot), size) for slot in slots if (size := _size(slot)))
    findings = _zero_weights(slots)
    for are_weights, are_clipped in product((False, True), repeat=2):
        some = [
            slot
            for slot in slots
            if (slot.kind == "weight", _clips_outliers(slot)) == (are_weights, are_clipped)
        ]
        findings += _outliers(
            some, are_weights=are_weights, are_clipped=are_clipped, equalized=equalized
        )
    findings += _wide([s for s in slots if _outlier_ratio(s) is None], usual, equalized)
    findings += _dead(slots, usual)
    return findings + _few_tokens(slots)


def layer_findings(layers: Sequence[LayerError]) -> list[Finding]:
    """Find layers that lose much, by themselves or beside others of their kind."""
    known = [(layer, sqnr) for layer in layers if (sqnr := _sqnr(layer)) is not None]
    usual = _Usual((_leaf(layer.module), "layers", sqnr) for layer, sqnr in known)
    low, behind = [], []
    for layer, sqnr in known:
        middle = usual.of(_leaf(layer.module), "layers")
        if sqnr < _LOW_SQNR:
            text = f"{_measured_part(layer)} is only {sqnr:.1f} dB above its quantization error"
            low.append(_Case(about=layer.module, text=text, weight=-sqnr))
        elif middle is not None and sqnr < middle - _SQNR_BEHIND:
            text = (
                f"{_measured_part(layer)} is {sqnr:.1f} dB above its quantization error, where "
                f"{middle:.1f} dB are usual for its kind"
            )
            behind.append(_Case(about=layer.module, text=text, weight=middle - sqnr))
    return [
        *_grouped(
            low,
            "layers lose a large part of their output to quantization",
            "Later layers compute with this noise; give it more bits or a finer strategy, or "
            "ignore it in the recipe.",
        ),
        *_grouped(
            behind,
            "layers lose much more than others of their kind",
            "It may cost the model more than any other layer; try another observer or a finer "
            "strategy for it, or ignore it in the recipe.",
        ),
    ]


def unquantized_findings(
    *, without_data: Sequence[str], not_finite: Sequence[str], modules: Sequence[str]
) -> list[Finding]:
    """Report what stays in full precision.

    :param without_data: accepted slots that saw no data
    :param not_finite: accepted slots whose statistics are not finite
    :param modules: Linear modules that the recipe leaves out
    """
    findings = _grouped(
        [_Case(about=name, text="It saw no data", weight=0) for name in without_data],
        "slots saw no data",
        "It was accepted without data and stays in full precision, so it is neither smaller nor "
        "faster than before; calibrate on data that reaches it.",
        worst=False,
    )
    broken = "It has NaN or Inf in its statistics"
    findings += _grouped(
        [_Case(about=name, text=broken, weight=0) for name in not_finite],
        "slots have NaN or Inf in their statistics",
        "It was accepted like this and stays in full precision; find out why values overflow "
        "there.",
        worst=False,
    )
    if modules:
        many = "Linear modules stay" if len(modules) > 1 else "Linear module stays"
        text = f"{len(modules):,} {many} in full precision, as the recipe says: {_listed(modules)}."
        findings.append(Finding(severity="note", text=text))
    return findings


def _outliers(
    slots: Iterable[SlotRecord], *, are_weights: bool, are_clipped: bool, equalized: bool
) -> list[Finding]:
    found = []
    for slot in slots:
        ratio = _outlier_ratio(slot)
        if ratio is not None:
            text = (
                f"99.9 % of its values lie within 1/{ratio:.0f} of its range, which goes from "
                f"{slot.low:.4g} to {slot.high:.4g}"
            )
            found.append(_Case(about=slot.name, text=text, weight=ratio))
    if are_clipped:
        return _grouped(
            found,
            "slots have outliers that are clipped",
            "Clipping the outliers keeps the other values precise; if the output suffers, the "
            "outliers mattered.",
            severity="note",
        )
    return _grouped(
        found,
        "slots have outliers that set their scale",
        "A few outliers set the scale, and all other values share a few steps. "
        + (_FINER_WEIGHTS if are_weights else _FINER_INPUTS)
        + _switch(found, equalized),
    )


def _switch(found: Iterable[_Case], equalized: bool) -> str:
    """Name the switch that moves outliers of inputs into weights, where it is not on."""
    if equalized or not any(case.about.endswith(".input") for case in found):
        return ""
    return (
        ' equalize="auto" in the recipe, --equalize auto, moves the size of outlier channels into '
        "the weights that read them, without changing the model."
    )


def _wide(slots: Iterable[SlotRecord], usual: "_Usual", equalized: bool) -> list[Finding]:
    found = []
    for slot in slots:
        size, middle = _size(slot), usual.of(*_kinds(slot))
        if size is not None and middle and size > _WIDE * middle:
            text = (
                f"Its values range from {slot.low:.4g} to {slot.high:.4g}, {size / middle:.0f} "
                "times as far as is usual for its kind"
            )
            found.append(_Case(about=slot.name, text=text, weight=size / middle))
    return _grouped(
        found,
        "slots have a range far wider than others of their kind",
        "Such outliers make coarse steps for all values that share their scale; a finer strategy, "
        "an observer that clips, or ignoring the module may help." + _switch(found, equalized),
    )


def _zero_weights(slots: Iterable[SlotRecord]) -> list[Finding]:
    found = [slot.name for slot in slots if _is_zero_weight(slot)]
    return _grouped(
        [_Case(about=name, text="It is all zeros", weight=0) for name in found],
        "weights are all zeros",
        "Check that the weights of the model were loaded, or ignore the module.",
        worst=False,
    )


def _is_zero_weight(slot: SlotRecord) -> bool:
    return slot.kind == "weight" and slot.low == slot.high == 0


def _dead(slots: Iterable[SlotRecord], usual: "_Usual") -> list[Finding]:
    found = []
    for slot in slots:
        size, middle = _size(slot), usual.of(*_kinds(slot))
        if size is None or slot.low is None or slot.high is None:
            continue
        if _is_zero_weight(slot):
            continue  # found by itself
        if slot.low == slot.high:
            text = f"All its values are {slot.low:.4g}"
            found.append(_Case(about=slot.name, text=text, weight=math.inf))
        elif middle and size < _DEAD * middle:
            text = (
                f"Its values range from {slot.low:.4g} to {slot.high:.4g}, 1/{middle / size:.0f} "
                "of the usual range of its kind"
            )
            found.append(_Case(about=slot.name, text=text, weight=middle / size))
    return _grouped(
        found,
        "slots are nearly dead",
        "It is nearly dead: its scale is so small that larger values in use would be clipped; "
        "check that the data exercises it, or ignore the module.",
    )


def _few_tokens(slots: Iterable[SlotRecord]) -> list[Finding]:
    """Find slots that saw few tokens, beside slots of the same role in other blocks or experts.

    Slots of other roles say nothing: a pooler sees one token of each text, and a router sees all.
    """
    # Slots without any token stay in full precision, and are reported as such.
    seen = [(slot, slot.tokens) for slot in slots if slot.tokens]
    groups: dict[str, list[int]] = {}
    for slot, tokens in seen:
        groups.setdefault(_role(slot), []).append(tokens)
    usual = {role: median_low(group) for role, group in groups.items() if len(group) >= _ENOUGH}
    experts: list[_Case] = []
    others: list[_Case] = []
    for slot, tokens in seen:
        middle = usual.get(_role(slot))
        if middle is None or tokens >= _FEW_TOKENS * middle:
            continue
        text = f"It saw {tokens:,} tokens, where {middle:,} are usual for its kind"
        case = _Case(about=slot.name, text=text, weight=middle / tokens)
        (experts if _is_in_expert(slot) else others).append(case)
    return [
        *_grouped(
            experts,
            "slots of experts saw few tokens",
            "Its scale rests on little data, as is common for experts that are rarely chosen; "
            "calibrate on more data, or on more varied data.",
        ),
        *_grouped(
            others,
            "slots saw few tokens",
            "Its scale rests on little data; calibrate on more data, or on more varied data.",
        ),
    ]


def _grouped(
    found: Sequence[_Case],
    many: str,
    meaning: str,
    *,
    severity: Severity = "warning",
    worst: bool = True,
) -> list[Finding]:
    """Make a finding of each case, or a single one if there are many.

    :param many: words for all cases together, to follow their number
    :param meaning: consequence and advice, for any of the cases
    :param worst: whether some cases are worse than others
    """
    ranked = sorted(found, key=lambda case: -case.weight)
    if len(ranked) <= _EACH:
        return [
            Finding(severity=severity, text=f"{one.text}. {meaning}", about=one.about)
            for one in ranked
        ]
    if not worst:
        names = _listed([one.about for one in ranked])
        return [Finding(severity=severity, text=f"{len(ranked):,} {many}: {names}. {meaning}")]
    first = ranked[0]
    text = f"{len(ranked):,} {many}; the worst is {first.about}. {first.text}. {meaning}"
    return [Finding(severity=severity, text=text, about=first.about)]


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more:,} more" if more > 0 else "")


class _Usual:
    """Medians by kind, with those of a coarser kind where a finer one has too few values."""

    def __init__(self, values: Iterable[tuple[str, str, float]]) -> None:
        groups: dict[str, list[float]] = {}
        for fine, coarse, value in values:
            groups.setdefault(fine, []).append(value)
            groups.setdefault(coarse, []).append(value)
        self._medians = {
            kind: median_low(group) for kind, group in groups.items() if len(group) >= _ENOUGH
        }

    def of(self, fine: str, coarse: str) -> float | None:
        return self._medians.get(fine, self._medians.get(coarse))


def _kinds(slot: SlotRecord) -> tuple[str, str]:
    return f"{_leaf(slot.module)}.{slot.kind}", slot.kind


def _role(slot: SlotRecord) -> str:
    """Return the slot's name without the numbers of blocks and experts."""
    parts = slot.module.split(".")
    return ".".join(["*" if part.isdecimal() else part for part in parts] + [slot.kind])


def _is_in_expert(slot: SlotRecord) -> bool:
    return any("expert" in part.lower() for part in slot.module.split("."))


def _leaf(module: str) -> str:
    return module.rpartition(".")[2]


def _size(slot: SlotRecord) -> float | None:
    """Return the largest magnitude in a slot, or None if it is unknown."""
    if slot.low is None or slot.high is None:
        return None
    size = max(abs(slot.low), abs(slot.high))
    return size if math.isfinite(size) else None


def _outlier_ratio(slot: SlotRecord) -> float | None:
    """Return how much wider the range is than nearly all values need, or None if not by much."""
    size = _size(slot)
    # With many scales an outlier disturbs only the values that share its scale.
    if slot.distribution is None or slot.scale_count != 1 or not size:
        return None
    bulk = _bulk(slot.distribution)
    return size / bulk if bulk is not None and bulk * _BULK_RATIO < size else None


def _bulk(distribution: Distribution) -> float | None:
    """Return the magnitude that nearly all values stay below, or None if nearly all are zero."""
    edges = distribution.edges
    outer = [max(abs(a), abs(b)) for a, b in pairwise(edges)]
    wanted = _BULK * sum(distribution.counts)
    reached = 0.0
    for magnitude, count in sorted(zip(outer, distribution.counts, strict=True)):
        reached += count
        if reached >= wanted:
            return magnitude or None
    return None


def _clips_outliers(slot: SlotRecord) -> bool:
    distribution, size = slot.distribution, _size(slot)
    if distribution is None or not size:
        return False
    limits = [v for v in (distribution.clip_low, distribution.clip_high) if v is not None]
    return bool(limits) and max(map(abs, limits)) < size / 2


def _sqnr(layer: LayerError) -> float | None:
    """Return the SQNR of the output, or that of the weight if no data reached the layer."""
    value = layer.weight_sqnr_db if layer.sqnr_db is None else layer.sqnr_db
    return None if value is None or math.isnan(value) else value


def _measured_part(layer: LayerError) -> str:
    return "Its weight" if layer.sqnr_db is None else "Its output"
