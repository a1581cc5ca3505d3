"""Whether padding is left out of statistics: against hooks, and against sequences one by one."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from inlay.calibration import Calibration
from inlay.calibration.tracing.strategies import call
from inlay.checking.agreement import require_statistics, rounding_of
from inlay.checking.alone import ComputedOtherwiseError, named, sequences_of, valid_of
from inlay.checking.hooks import Hooks
from inlay.errors import CheckError, StatisticsError
from inlay.recipe import Plan
from inlay.reductions import AVERAGE, reduction_of

__all__ = ["has_padding", "padding_agrees", "sequences_agree"]


def has_padding(model: nn.Module, batches: Sequence[Any]) -> bool:
    """Tell whether an attention mask of any batch leaves tokens out."""
    masks = (
        valid_of(whole, prefix)
        for whole in (named(model, batch) for batch in batches)
        for prefix in ("", "decoder_")
    )
    return any(mask is not None and not bool(mask.all()) for mask in masks)


def padding_agrees(
    calibration: Calibration, batches: Sequence[Any], tolerance: float
) -> tuple[str, bool]:
    """Hold a calibration that leaves padding out against hooks that are shown tokens alone.

    Tokens are known by their values: a model computes the same for a sequence alone.
    """
    model = calibration.model
    try:
        for batch in batches:
            call(calibration.observe, batch)
        calibration.graphs.require_padding_left_out()
    except StatisticsError as error:
        return f"padding, as {str(error).partition(';')[0].removeprefix('the batch has ')}", False
    try:
        with Hooks.on(model, calibration.plan) as hooks:
            for batch in batches:
                hooks.run_without_padding(batch)
    except ComputedOtherwiseError:
        return "sequences one by one, which the model computes otherwise beside padding", False
    snapshot = calibration.statistics.snapshot()
    compared = 0
    # The model itself rounds otherwise in batches of another size.
    far = max(tolerance, rounding_of(model))
    for name, seen in hooks.seen.items():
        found = snapshot.get(name)
        if found is None or not seen.values:
            continue
        exact = tolerance == 0 and not calibration.plan.is_routed(name.rpartition(".")[0])
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
    model = padded.model
    alone = make()
    for batch in batches:
        whole = named(model, batch)
        if valid_of(whole) is None and valid_of(whole, "decoder_") is None:
            call(alone.observe, whole)
            continue
        for sequence in sequences_of(whole):
            call(alone.observe, sequence)
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
    """Whether a slot keeps an average or the last value. Both depend on how data is batched."""
    slot = plan.slots.get(name)
    if slot is None:  # importance, and ranges of channels
        return False
    declared = type(slot.make_observer())._act_sync_dict
    reductions = [reduction_of(operation, key) for key, operation in declared.items()]
    return not reductions or AVERAGE in reductions
