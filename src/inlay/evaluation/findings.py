"""What a reader should be told of the slots and layers of a calibration."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median_low
from typing import Literal

from inlay.report.data import Distribution, LayerError, Remark, SlotRecord

__all__ = ["layer_remarks", "slot_remarks", "unquantized_remarks"]

# 8 bits have 255 steps. If nearly all values lie within a twentieth of the range, they share a
# dozen, which is less than 4 bits would give them without the outliers.
_BULK = 0.999
_BULK_RATIO = 20.0
# Ranges of one kind of slot grow with depth, by ten at most; massive activations are hundreds.
_WIDE = 50.0
# A slot so narrow beside its kind adds nothing that the others' rounding does not drown.
_DEAD = 1e-3
# With a tenth of the tokens of the others, the largest value seen is likely not the largest.
_FEW_TOKENS = 0.1
# At 10 dB a third of the amplitude is noise; int4 weights in groups are at about 20.
_LOW_SQNR = 10.0
# Layers of one kind vary by a few dB. 12 dB are two bits that this one lost beside the others.
_SQNR_BEHIND = 12.0
# Fewer of a kind do not say what is usual for it.
_ENOUGH = 4
# More findings of one sort are put into one remark.
_EACH = 3
_NAMED = 5  # modules that are named in a list

Severity = Literal["note", "warning"]


@dataclass(frozen=True, kw_only=True)
class _Finding:
    """Something found at one place; the larger `weight` is, the worse."""

    about: str
    text: str
    weight: float


def slot_remarks(slots: Sequence[SlotRecord]) -> list[Remark]:
    """Outliers, nearly dead slots, and slots that saw few tokens."""
    usual = _Usual((*_kinds(slot), size) for slot in slots if (size := _size(slot)))
    remarks = []
    for are_clipped in (False, True):
        remarks += _outliers([s for s in slots if _clips_outliers(s) == are_clipped], are_clipped)
    remarks += _wide([s for s in slots if _outlier_ratio(s) is None], usual)
    remarks += _dead(slots, usual)
    return remarks + _few_tokens(slots)


def layer_remarks(layers: Sequence[LayerError]) -> list[Remark]:
    """Layers that lose much, by themselves or beside others of their kind."""
    known = [(layer, sqnr) for layer in layers if (sqnr := _sqnr(layer)) is not None]
    usual = _Usual((_leaf(layer.module), "layers", sqnr) for layer, sqnr in known)
    low, behind = [], []
    for layer, sqnr in known:
        middle = usual.of(_leaf(layer.module), "layers")
        if sqnr < _LOW_SQNR:
            text = f"{_what(layer)} is only {sqnr:.1f} dB above its quantization error"
            low.append(_Finding(about=layer.module, text=text, weight=-sqnr))
        elif middle is not None and sqnr < middle - _SQNR_BEHIND:
            text = (
                f"{_what(layer)} is {sqnr:.1f} dB above its quantization error, where {middle:.1f} "
                "dB are usual for its kind"
            )
            behind.append(_Finding(about=layer.module, text=text, weight=middle - sqnr))
    return [
        *_grouped(
            low,
            "layers lose a large part of their output to quantization",
            "What follows it computes with noise; give it more bits or a finer strategy, or ignore "
            "it in the recipe.",
        ),
        *_grouped(
            behind,
            "layers lose much more than others of their kind",
            "It may be what costs the model most; try another observer or a finer strategy for "
            "it, or ignore it in the recipe.",
        ),
    ]


def unquantized_remarks(
    *, without_data: Sequence[str], not_finite: Sequence[str], modules: Sequence[str]
) -> list[Remark]:
    """What stays in full precision: accepted slots, and modules that the recipe leaves out."""
    remarks = _grouped(
        [_Finding(about=name, text="It saw no data", weight=0) for name in without_data],
        "slots saw no data",
        "It was accepted as it is and stays in full precision, so it is neither smaller nor faster "
        "than before; calibrate on data that reaches it.",
        worst=False,
    )
    broken = "It has NaN or Inf in its statistics"
    remarks += _grouped(
        [_Finding(about=name, text=broken, weight=0) for name in not_finite],
        "slots have NaN or Inf in their statistics",
        "It was accepted as it is and stays in full precision; look for what overflows there.",
        worst=False,
    )
    if modules:
        many = "Linear modules stay" if len(modules) > 1 else "Linear module stays"
        text = f"{len(modules):,} {many} in full precision, as the recipe says: {_listed(modules)}."
        remarks.append(Remark(severity="note", text=text))
    return remarks


def _outliers(slots: Iterable[SlotRecord], are_clipped: bool) -> list[Remark]:
    found = []
    for slot in slots:
        ratio = _outlier_ratio(slot)
        if ratio is not None:
            text = (
                f"99.9 % of its values lie within 1/{ratio:.0f} of its range, which goes from "
                f"{slot.low:.4g} to {slot.high:.4g}"
            )
            found.append(_Finding(about=slot.name, text=text, weight=ratio))
    if are_clipped:
        return _grouped(
            found,
            "slots have outliers that are clipped",
            "The outliers are clipped so that the rest is precise; if the output suffers, they "
            "mattered.",
            severity="note",
        )
    return _grouped(
        found,
        "slots have outliers that set their scale",
        "A few outliers set the scale, and all the rest shares a few steps; scales per token, as "
        "dynamic schemes have them, help most. An observer that clips, such as histogram or mse, "
        "helps only where the outliers do not matter.",
    )


def _wide(slots: Iterable[SlotRecord], usual: "_Usual") -> list[Remark]:
    found = []
    for slot in slots:
        size, middle = _size(slot), usual.of(*_kinds(slot))
        if size is not None and middle and size > _WIDE * middle:
            text = (
                f"Its values go from {slot.low:.4g} to {slot.high:.4g}, {size / middle:.0f} times "
                "as far as is usual for its kind"
            )
            found.append(_Finding(about=slot.name, text=text, weight=size / middle))
    return _grouped(
        found,
        "slots have a range far wider than others of their kind",
        "Such outliers make steps coarse for whatever shares a scale with them; a finer strategy, "
        "an observer that clips, or ignoring the module may help.",
    )


def _dead(slots: Iterable[SlotRecord], usual: "_Usual") -> list[Remark]:
    found = []
    for slot in slots:
        size, middle = _size(slot), usual.of(*_kinds(slot))
        if size is None or slot.low is None or slot.high is None:
            continue
        if slot.low == slot.high:
            text = f"All its values are {slot.low:.4g}"
            found.append(_Finding(about=slot.name, text=text, weight=math.inf))
        elif middle and size < _DEAD * middle:
            text = (
                f"Its values go from {slot.low:.4g} to {slot.high:.4g}, 1/{middle / size:.0f} of "
                "what is usual for its kind"
            )
            found.append(_Finding(about=slot.name, text=text, weight=middle / size))
    return _grouped(
        found,
        "slots are nearly dead",
        "It is nearly dead: its scale is so small that a larger value in use would be cut off; "
        "check that the data exercises it, or ignore the module.",
    )


def _few_tokens(slots: Iterable[SlotRecord]) -> list[Remark]:
    # Those without any are in full precision, and told of as such.
    seen = [(slot.name, slot.tokens) for slot in slots if slot.tokens]
    if len(seen) < _ENOUGH:
        return []
    middle = median_low(tokens for _, tokens in seen)
    found = [
        _Finding(
            about=name,
            text=f"It saw {tokens:,} tokens, where {middle:,} are usual",
            weight=middle / tokens,
        )
        for name, tokens in seen
        if tokens < _FEW_TOKENS * middle
    ]
    return _grouped(
        found,
        "slots saw few tokens",
        "Its scale rests on little data, as is common for experts that are rarely chosen; "
        "calibrate on more data, or on more varied data.",
    )


def _grouped(
    found: Sequence[_Finding],
    many: str,
    meaning: str,
    *,
    severity: Severity = "warning",
    worst: bool = True,
) -> list[Remark]:
    """A remark for each finding, or one for all if they are many.

    :param many: what they have in common, after their number
    :param meaning: what follows from it, for any of them
    :param worst: whether some are worse than others
    """
    ranked = sorted(found, key=lambda finding: -finding.weight)
    if len(ranked) <= _EACH:
        return [
            Remark(severity=severity, text=f"{one.text}. {meaning}", about=one.about)
            for one in ranked
        ]
    if not worst:
        names = _listed([one.about for one in ranked])
        return [Remark(severity=severity, text=f"{len(ranked):,} {many}: {names}. {meaning}")]
    first = ranked[0]
    text = f"{len(ranked):,} {many}; the worst is {first.about}. {first.text}. {meaning}"
    return [Remark(severity=severity, text=text, about=first.about)]


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more:,} more" if more > 0 else "")


class _Usual:
    """What is usual: the median of the same kind, or of a wider one if there are too few."""

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


def _leaf(module: str) -> str:
    return module.rpartition(".")[2]


def _size(slot: SlotRecord) -> float | None:
    """The largest magnitude in a slot, where it is known."""
    if slot.low is None or slot.high is None:
        return None
    size = max(abs(slot.low), abs(slot.high))
    return size if math.isfinite(size) else None


def _outlier_ratio(slot: SlotRecord) -> float | None:
    """How much wider the range is than what nearly all values need, where that is a lot."""
    size = _size(slot)
    # Many scales mean that an outlier disturbs only those that share one with it.
    if slot.distribution is None or slot.scale_count != 1 or not size:
        return None
    bulk = _bulk(slot.distribution)
    return size / bulk if bulk is not None and bulk * _BULK_RATIO < size else None


def _bulk(distribution: Distribution) -> float | None:
    """The magnitude that nearly all values stay below. None if nearly all are zero."""
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
    """Of the output, or of the weight alone if no data reached the layer."""
    value = layer.weight_sqnr_db if layer.sqnr_db is None else layer.sqnr_db
    return None if value is None or math.isnan(value) else value


def _what(layer: LayerError) -> str:
    return "Its weight" if layer.sqnr_db is None else "Its output"
