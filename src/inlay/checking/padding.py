"""Whether padding is left out of statistics: against hooks, and against sequences one by one."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from inlay.calibration import Calibration
from inlay.checking.agreement import (
    CLOSE,
    call,
    differ_by,
    require_statistics,
    rounding_of,
    tensors_in,
)
from inlay.checking.hooks import Hooks
from inlay.errors import CheckError, StatisticsError
from inlay.recipe import Plan
from inlay.reductions import AVERAGE, reduction_of

__all__ = ["has_padding", "padding_agrees", "sequences_agree"]

_MASK = "attention_mask"


def has_padding(batches: Sequence[Any]) -> bool:
    """Tell whether the attention mask of any batch leaves tokens out."""
    return any(mask is not None and not bool(mask.all()) for mask in map(_mask_of, batches))


def padding_agrees(
    calibration: Calibration, batches: Sequence[Any], tolerance: float
) -> tuple[str, bool]:
    """Hold a calibration that leaves padding out against hooks that are shown tokens alone."""
    model = calibration.model
    with Hooks.on(model, calibration.plan) as hooks:
        for batch in batches:
            hooks.valid = _mask_of(batch)
            call(model, batch)
    for batch in batches:
        calibration.run(batch)
    try:
        calibration.require_padding_left_out()
    except StatisticsError as error:
        return f"padding, as {str(error).partition(';')[0].removeprefix('the batch has ')}", False
    snapshot = calibration.statistics.snapshot()
    compared = 0
    for name, seen in hooks.seen.items():
        found = snapshot.get(name)
        if found is None or not seen.values:
            continue
        # Extremes stay what they are; sums leave padding out by adding zeros.
        far = max(tolerance, rounding_of(model))
        exact = tolerance == 0 and name.rpartition(".")[0] not in calibration.plan.experts
        require_statistics(
            name,
            found.observer(),
            seen.observer,
            far,
            by="by hooks that leave padding out",
            exact_extremes=exact,
        )
        compared += 1
    return f"without padding, statistics of {compared} slots are those of the tokens alone", True


def sequences_agree(
    padded: Calibration, batches: Sequence[Any], make: Callable[[], Calibration], tolerance: float
) -> tuple[str, bool]:
    """Hold a calibration that left padding out against one that is given sequences one by one.

    :param make: makes another calibration of the same model
    """
    if any(_masks(batch) != {_MASK} for batch in batches):
        return "sequences one by one, as batches have other masks than the attention mask", False
    model = padded.model
    if not all(_is_the_same_alone(model, batch) for batch in batches):
        return "sequences one by one, which the model computes otherwise beside padding", False
    alone = make()
    for batch in batches:
        for sequence in _sequences(batch):
            alone.run(sequence)
    found, expected = (each.statistics.snapshot() for each in (padded, alone))
    if found.keys() != expected.keys():
        names = ", ".join(sorted(found.keys() ^ expected.keys())[:5])
        raise CheckError(f"only padded batches, or only sequences one by one, reach {names}")
    compared = 0
    # The model itself rounds otherwise in batches of another size.
    close = max(tolerance, rounding_of(model) * 8)
    for name, statistics in found.items():
        if _weighs_batches(padded.plan, name):
            continue
        own, other = statistics.observer(), expected[name].observer()
        require_statistics(name, own, other, close, by="for its sequences one by one")
        compared += 1
    if not compared:
        return "sequences one by one, as all observers weigh batches by their order", False
    return f"{compared} slots have the statistics of the sequences one by one", True


def _weighs_batches(plan: Plan, name: str) -> bool:
    """Whether a slot keeps averages, or what the last value was: both depend on the batches."""
    slot = plan.slots.get(name)
    if slot is None:  # importance, and ranges of channels
        return False
    declared = type(slot.make_observer())._act_sync_dict
    reductions = [reduction_of(operation, key) for key, operation in declared.items()]
    return not reductions or AVERAGE in reductions


def _mask_of(batch: Any) -> torch.Tensor | None:
    mask = batch.get(_MASK) if isinstance(batch, Mapping) else None
    return mask.bool() if isinstance(mask, torch.Tensor) and mask.dim() == 2 else None


def _masks(batch: Any) -> set[str]:
    return {key for key in batch if key.endswith(_MASK)} if isinstance(batch, Mapping) else set()


def _sequences(batch: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the sequences of a padded batch, each as a batch of its own without padding."""
    mask = _mask_of(batch)
    assert mask is not None
    for row, kept in enumerate(mask):
        if not bool(kept.any()):
            continue
        yield {key: _of_row(value, mask, row) for key, value in batch.items()}


def _of_row(value: Any, mask: torch.Tensor, row: int) -> Any:
    if not isinstance(value, torch.Tensor) or value.shape[:1] != mask.shape[:1]:
        return value
    own = value[row : row + 1]
    return own[:, mask[row]] if value.shape[:2] == mask.shape else own


def _is_the_same_alone(model: nn.Module, batch: Any) -> bool:
    """Whether the model computes for a sequence what it computes for it beside padding."""
    mask = _mask_of(batch)
    if mask is None:
        return False
    with torch.no_grad():
        together = [each for each in tensors_in(call(model, batch)) if each.shape[:2] == mask.shape]
        rows = [row for row, kept in enumerate(mask) if bool(kept.any())]
        for row, sequence in zip(rows, _sequences(batch), strict=True):
            alone = [each for each in tensors_in(call(model, sequence)) if each.dim() > 1]
            kept = [each[row][mask[row]] for each in together]
            alike = [each[0] for each in alone if each.shape[1] == int(mask[row].sum())]
            if len(alike) != len(kept) or not kept:
                return False
            close = max(CLOSE, rounding_of(model))
            if any(differ_by(one, other) > close for one, other in zip(kept, alike, strict=True)):
                return False
    return True
