"""Laws for an observer and several values: batches, ranks, padding, and what is stored."""

import functools
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from hypothesis import strategies as st

from inlay.errors import StatisticsError
from inlay.reductions import AVERAGE, MAXIMUM, MINIMUM, SUM, merged
from inlay.statistics.functional import keeps_only_tensors, tensors_of
from inlay.statistics.on_disk import StoredStatistics
from inlay.statistics.rule import Rule
from inlay.statistics.value import Statistics, merge
from inlay.testing.law import BrokenLawError, Law, law, require
from inlay.testing.observer_cases import (
    ObserverCase,
    ObserverSubject,
    gathered,
    short,
    tensors_after,
)

__all__ = ["LAWS", "require_equal"]

Subject = ObserverSubject
Tensors = Mapping[str, torch.Tensor]
# Sums are rounded. This is far above the rounding of float32, and below that of half precision.
_CLOSE = 1e-3
_REPEATS = 300  # more batches than bfloat16 can count


def _also(case: ObserverCase, **drawn: st.SearchStrategy[Any]) -> st.SearchStrategy[ObserverCase]:
    """The case with more that is drawn for it."""
    return st.fixed_dictionaries(drawn).map(lambda also: replace(case, also=also))


def _gathers_nothing(subject: Subject) -> str | None:
    if not subject.gathering:
        return "it gathers no statistics while data runs"
    return None


def _declares_nothing(subject: Subject) -> str | None:
    if not subject.operations:
        return "_act_sync_dict is empty, so its statistics are those of the last value"
    return _gathers_nothing(subject)


def _depends_on_order(subject: Subject) -> str | None:
    if any(reduction is AVERAGE for reduction in subject.operations.values()):
        return "it keeps averages, which weigh batches by their order"
    return _declares_nothing(subject)


@law(lambda subject: subject.several(1), unless=_declares_nothing)
def declared_statistics_exist(subject: Subject, case: ObserverCase) -> None:
    """Every statistic that `_act_sync_dict` names is a tensor once a value was observed."""
    found = tensors_after(case, case.values)
    missing = [name for name in subject.operations if name not in found]
    require(
        not missing,
        f"_act_sync_dict names {', '.join(missing)}, and the observer has {', '.join(found)}",
    )


@law(lambda subject: subject.several(least=2), unless=_gathers_nothing)
def what_is_not_declared_is_of_the_last_batch(subject: Subject, case: ObserverCase) -> None:
    """A statistic that `_act_sync_dict` does not name depends on the last value alone."""
    all_of_them = tensors_after(case, case.values)
    last = tensors_after(case, case.values[-1:])
    undeclared = [name for name in all_of_them if name not in subject.operations]
    differing = [name for name in undeclared if not _equal(all_of_them[name], last.get(name))]
    require(
        not differing,
        f"{', '.join(differing)} remembers earlier batches, and _act_sync_dict does not say how it "
        "merges, so ranks would keep one each; name it there with MIN, MAX, SUM or AVG, or keep "
        "the last value only",
    )


@law(lambda subject: subject.several(1), unless=_depends_on_order)
def splitting_a_batch_changes_nothing(subject: Subject, case: ObserverCase) -> None:
    """MIN, MAX and SUM statistics of a batch are those of its rows one after another."""
    (value,) = case.values
    rows = [value[row : row + 1] for row in range(value.shape[0])]
    whole, parts = tensors_after(case, [value]), tensors_after(case, rows)
    _require_declared(
        subject, parts, whole, f"{len(rows)} rows one after another", "the same at once"
    )


@law(
    lambda subject: subject.several(least=2).flatmap(
        lambda case: _also(case, order=st.permutations(range(len(case.values))))
    ),
    unless=_depends_on_order,
)
def the_order_of_batches_does_not_matter(subject: Subject, case: ObserverCase) -> None:
    """MIN, MAX and SUM statistics are the same for batches in any order."""
    order = case.also["order"]
    straight = tensors_after(case, case.values)
    shuffled = tensors_after(case, [case.values[place] for place in order])
    _require_declared(subject, shuffled, straight, f"batches in the order {order}", "them in order")


@law(lambda subject: subject.several(1), unless=_declares_nothing, cost=10)
def repeated_batches_add_up_in_sums_alone(subject: Subject, case: ObserverCase) -> None:
    """The same batch again changes no MIN, MAX or AVG, and a SUM of 300 is 300 times as large."""
    once = tensors_after(case, case.values)
    found = tensors_after(case, case.values * _REPEATS)
    for name, reduction in subject.operations.items():
        factor = _REPEATS if reduction is SUM else 1
        close = torch.allclose(found[name].double(), once[name].double() * factor, _CLOSE, _CLOSE)
        says = "a SUM should be that often as large" if factor > 1 else "it should stay the same"
        require(
            close,
            f"{name} is {short(once[name])} for a batch and {short(found[name])} for {_REPEATS} "
            f"times the batch, and {says}. Is it declared as what it is, and summed in float32 or "
            "float64?",
        )


@law(
    lambda subject: subject.several(1),
    unless=lambda subject: (
        _declares_nothing(subject)
        if AVERAGE in subject.operations.values()
        else "it declares no statistic as AVG"
    ),
)
def averages_lie_between_what_they_average(subject: Subject, case: ObserverCase) -> None:
    """An AVG of two batches lies between those of each, and is no extreme in either order."""
    small, large = case.values[0], case.values[0] * 4
    alone = [tensors_after(case, [value]) for value in (small, large)]
    both = [tensors_after(case, pair) for pair in ((small, large), (large, small))]
    for name, reduction in subject.operations.items():
        if reduction is not AVERAGE:
            continue
        ends = torch.stack([tensors[name].double() for tensors in alone])
        low, high = ends.amin(0), ends.amax(0)
        found = torch.stack([tensors[name].double() for tensors in both])
        slack = (high - low) * _CLOSE
        told = f"{name} is {short(alone[0][name])} for a batch, {short(alone[1][name])} for another"
        require(
            ((low - slack <= found) & (found <= high + slack)).all(),
            f"{told} and {short(both[0][name])} for both, which no average of theirs is. Is it "
            "declared as what it is?",
        )
        for end, operation in ((low, "MIN"), (high, "MAX")):
            always = ((found - end).abs() <= slack).all(0) & (slack > 0)
            require(
                not always.any(),
                f"{told} and {short(both[0][name])} for both in either order; declare it as "
                f"{operation}, not as AVG, or keep an average",
            )


@law(
    lambda subject: subject.bad(subject.several(least=2), ["nan", "inf"]),
    unless=lambda subject: (
        "a weight is searched without importance then, with a warning"
        if subject.observer_class.observes_input
        else _depends_on_order(subject)
    ),
)
def a_bad_batch_is_not_forgotten(subject: Subject, case: ObserverCase) -> None:
    """If any batch held NaN or infinity, get_qparams raises or warns, whatever came after."""
    bad = case.values[0].view(-1)[0].item()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            qparams = case.observer(case.values).get_qparams()
        except ValueError:
            return
    require(
        told,
        f"the first batch held {bad}, and get_qparams() gives the scale "
        f"{short(qparams['scale'])} without a word; let it stay in the statistics",
    )


@law(
    lambda subject: subject.several(least=2).flatmap(
        lambda case: _also(case, cut=st.integers(1, len(case.values) - 1))
    ),
    unless=_declares_nothing,
)
def ranks_merge_to_one_process(subject: Subject, case: ObserverCase) -> None:
    """Statistics of two ranks, and one without data, merge to what one process gathers."""
    cut = case.also["cut"]
    try:
        ranks = [gathered(case, part) for part in ((), case.values[:cut], case.values[cut:])]
        found = functools.reduce(merge, ranks)
    except StatisticsError as error:
        raise BrokenLawError(f"its statistics cannot be merged over ranks: {error}") from error
    if _depends_on_order(subject) is None:
        expected = tensors_after(case, case.values)
    else:
        own = [tensors_after(case, part) for part in (case.values[:cut], case.values[cut:])]
        seen = (cut, len(case.values) - cut)
        expected = {
            name: merged(reduction, [(of[name], n) for of, n in zip(own, seen, strict=True)])
            for name, reduction in subject.operations.items()
        }
    _require_declared(subject, found.tensors, expected, "merged over ranks", "one process")
    require(int(found.seen) == len(case.values), f"{int(found.seen)} values are counted")


@law(
    Subject.padded,
    unless=lambda subject: (
        _gathers_nothing(subject)
        if subject.leaves_out_padding or not subject.gathering
        else "it does not override update_statistics_from_valid, and so cannot leave padding out"
    ),
)
def padding_is_left_out(subject: Subject, case: ObserverCase) -> None:
    """A padded batch has the statistics of its tokens without padding."""
    (value,), mask = case.values, case.also["mask"]
    rule = Rule(case.slot)
    padded, alone = case.observer(), case.observer()
    rule.take_in(padded, value, mask)
    tokens = value.transpose(1, 2) if case.slot.is_attention else value
    kept = tokens[mask.bool()]  # (tokens, features), or (tokens, heads, size)
    case.show(alone, kept.unsqueeze(2) if case.slot.is_attention else kept)
    for name, expected in tensors_of(alone).items():
        found = tensors_of(padded).get(name)
        require(
            found is not None and _same(subject, name, found, expected),
            f"{name} is {short(found)} for the padded batch and {short(expected)} for its tokens "
            "alone; update_statistics_from_valid must leave out what `valid` does not mark",
        )


@law(lambda subject: subject.several(least=2), unless=_gathers_nothing, cost=5)
def statistics_survive_storing(subject: Subject, case: ObserverCase) -> None:
    """A run that is stored and taken up again gathers what an uninterrupted one does."""
    name = case.slot.name
    half = len(case.values) // 2
    observer = case.observer(case.values[:half])
    require(
        keeps_only_tensors(observer, case.observer()),
        "it keeps what it learns outside of tensors, which is not stored; keep each statistic as a "
        "tensor in an attribute of its own",
    )
    before = gathered(case, case.values[:half])
    with tempfile.TemporaryDirectory() as folder:
        StoredStatistics(recipe={}, slots={name: before}).save(folder)
        stored = StoredStatistics.load(folder).slots[name]
    resumed = _resumed(case, stored, case.values[half:])
    expected = tensors_after(case, case.values)
    for key, tensor in expected.items():
        require(
            key in resumed and _close(resumed[key], tensor),
            f"{key} is {short(resumed.get(key))} if the run is stored after {half} batches and "
            f"taken up again, and {short(tensor)} without that",
        )


def _resumed(
    case: ObserverCase, stored: Statistics, values: Sequence[torch.Tensor]
) -> dict[str, torch.Tensor]:
    observer = stored.observer()
    for value in values:
        case.show(observer, value)
    return dict(tensors_of(observer))


def _require_declared(
    subject: Subject, found: Tensors, expected: Tensors, one_way: str, other_way: str
) -> None:
    """Require that declared statistics agree: MIN and MAX exactly, others closely."""
    declared = {name: expected[name] for name in subject.operations}
    require_equal(subject, found, declared, one_way, other_way)


def require_equal(
    subject: Subject, found: Tensors, expected: Tensors, one_way: str, other_way: str
) -> None:
    """The same for all statistics that are expected."""
    operations = subject.observer_class._act_sync_dict
    for name, tensor in expected.items():
        own = found.get(name)
        declared = ""
        if name in operations:
            operation = str(operations[name]).rpartition(".")[2]
            declared = f", declared as {operation} in _act_sync_dict,"
        require(
            own is not None and _same(subject, name, own, tensor),
            f"{name}{declared} is {short(own)} for {one_way} and {short(tensor)} for {other_way}",
        )


def _same(subject: Subject, name: str, one: torch.Tensor, other: torch.Tensor) -> bool:
    exact = subject.operations.get(name) in (MINIMUM, MAXIMUM)
    return _equal(one, other) if exact else _close(one, other)


def _equal(one: torch.Tensor, other: torch.Tensor | None) -> bool:
    return other is not None and torch.equal(one.nan_to_num(), other.nan_to_num())


def _close(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape:
        return False
    if not one.is_floating_point():
        return torch.equal(one, other)
    return torch.allclose(one.double(), other.double(), _CLOSE, _CLOSE, equal_nan=True)


LAWS: tuple[Law[Subject], ...] = (
    declared_statistics_exist,
    what_is_not_declared_is_of_the_last_batch,
    splitting_a_batch_changes_nothing,
    the_order_of_batches_does_not_matter,
    repeated_batches_add_up_in_sums_alone,
    averages_lie_between_what_they_average,
    a_bad_batch_is_not_forgotten,
    ranks_merge_to_one_process,
    padding_is_left_out,
    statistics_survive_storing,
)
