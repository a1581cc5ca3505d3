"""Laws for an observer and one value: what it gives, and what it leaves alone."""

import math
import warnings
from dataclasses import replace

import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle import fake_quantize
from compressed_tensors.quantization.utils import calculate_range
from hypothesis import strategies as st

from inlay.observers import Observer, QParamsDict, flatten_for_calibration
from inlay.reductions import AVERAGE
from inlay.statistics.functional import tensors_of
from inlay.testing.law import BrokenLawError, Law, law, require
from inlay.testing.observer_cases import ObserverCase, ObserverSubject, short

__all__ = ["LAWS"]

Subject = ObserverSubject
# The part of a value's norm that quantizing may change, so that nothing but nonsense is refused:
# of a single large number among zeros, cutting at three deviations leaves a fifth.
_LARGEST_ERROR = 0.9
_SCALES = ("scale", "zero_point")
# Strategies whose groups are parts of one row, so that columns can move within them.
_BY_COLUMN = ("channel", "group", "tensor_group")


@law(Subject.single)
def scales_have_the_shape_of_their_strategy(subject: Subject, case: ObserverCase) -> None:
    """A scale and a zero point for each group of elements, in a dtype that checkpoints hold."""
    (value,) = case.values
    qparams = case.observer([value]).get_qparams()
    shape = flatten_for_calibration(value, case.base_name, case.args).shape[1:-1]
    for key in ("scale", "zero_point"):
        found = tuple(_tensor(qparams, key).shape)
        require(
            found == tuple(shape),
            f"the {key} has shape {found}, and strategy {_name(case.args.strategy)} has "
            f"{tuple(shape)}; `observed` has shape (observations, *shape of the scale, elements "
            "that share a scale), so reduce over dimensions 0 and -1",
        )
    wanted = case.args.scale_dtype
    dtype = _tensor(qparams, "scale").dtype
    usual = (torch.float32, torch.bfloat16, torch.float16)
    require(
        dtype in usual if wanted is None else dtype in (wanted, torch.float32, value.dtype),
        f"the scale is {dtype}; convert the range before it becomes a scale",
    )


@law(Subject.single)
def scales_are_positive_and_zero_points_in_range(subject: Subject, case: ObserverCase) -> None:
    """Scales are finite and above zero, also for constants, zeros and a single element."""
    qparams = case.observer(case.values).get_qparams()
    scale = _tensor(qparams, "scale").float()
    zero_point = _tensor(qparams, "zero_point").float()
    low, high = calculate_range(case.args, scale.device)
    require(torch.isfinite(scale).all(), f"the scale is not finite: {short(scale)}")
    require((scale > 0).all(), f"the scale is not above zero: {short(scale)}")
    require(
        ((zero_point >= low) & (zero_point <= high)).all(),
        f"the zero point is {short(zero_point)}, and the format has {low.item():g} to "
        f"{high.item():g}",
    )


@law(lambda subject: subject.single(scaled=False, dynamic=False))
def quantized_values_resemble_the_observed_ones(subject: Subject, case: ObserverCase) -> None:
    """Quantizing the observed value keeps more of it than writing zeros would."""
    (value,) = case.values
    qparams = case.observer([value]).get_qparams()
    flat = flatten_for_calibration(value, case.base_name, case.args)
    error, norm = _differences(flat, case.args, qparams).norm(), flat.float().norm()
    require(
        error <= _LARGEST_ERROR * norm,
        f"quantizing what was observed loses nearly all of it: the error has norm {error:.4g}, the "
        f"value {norm:.4g}; does the range cover negative values as well as positive ones?",
    )


@law(Subject.single)
def observing_leaves_the_value_alone(subject: Subject, case: ObserverCase) -> None:
    """The observed tensor is neither changed nor kept, and the arguments stay as they are."""
    value = case.values[0].clone()
    before, arguments = value.clone(), case.args.model_dump()
    observer = case.observer()
    result = observer(value)
    require(result is observer, "observer(value) must return the observer itself")
    require(
        torch.equal(value, before),
        "observing changes the value in place, and the model reads it after that; use operations "
        "without an underscore, or clone",
    )
    require(
        case.args.model_dump() == arguments,
        "the observer changes the QuantizationArgs it was given; copy what you change",
    )


@law(Subject.single)
def statistics_are_not_the_value_itself(subject: Subject, case: ObserverCase) -> None:
    """Statistics stay when the memory of the value is written to, as activations are."""
    value = case.values[0].clone()
    observer = case.observer([value])
    before = _copied(observer)
    value.fill_(torch.nan)
    changed = _changed(before, _copied(observer))
    require(
        not changed,
        f"{', '.join(changed)} is a view of the observed value and changes with it; clone what you "
        "keep",
    )


@law(Subject.single)
def observers_do_not_share_statistics(subject: Subject, case: ObserverCase) -> None:
    """What one observer sees changes nothing in another."""
    (value,) = case.values
    one = case.observer([value])
    before = _copied(one)
    other = case.observer([value * 2 + 1])
    changed = _changed(before, _copied(one))
    require(not changed, f"another observer of the class changed {', '.join(changed)} of this one")
    again = _copied(case.observer([value]))
    changed = _changed(before, again)
    require(
        not changed,
        f"{', '.join(changed)} depends on what other observers saw; keep statistics in attributes "
        "of the observer, not of its class or module",
    )
    del other


@law(Subject.single)
def get_qparams_changes_nothing(subject: Subject, case: ObserverCase) -> None:
    """Asking for qparams twice gives the same twice, and leaves the statistics as they are."""
    observer = case.observer(case.values)
    before = _copied(observer)
    first = _cloned(observer.get_qparams())
    require(
        observer.has_statistics,
        "the statistics are gone after get_qparams(); a run that goes on would start anew",
    )
    changed = _changed(before, _copied(observer))
    require(not changed, f"get_qparams() changes {', '.join(changed)}")
    handed_out = observer.get_qparams()
    changed = _changed(first, _cloned(handed_out))
    require(not changed, f"get_qparams() gives another {', '.join(changed)} the second time")
    for tensor in _cloned(handed_out).values():
        tensor.zero_()
    changed = _changed(before, _copied(observer))
    require(not changed, f"get_qparams() hands out {', '.join(changed)} itself; clone it")


@law(Subject.single)
def without_values_there_are_no_qparams(subject: Subject, case: ObserverCase) -> None:
    """A new observer has no statistics and refuses qparams; an empty value changes nothing."""
    observer = case.observer()
    require(
        not observer.has_statistics,
        "has_statistics is true before any value was observed; override it if statistics are there "
        "from the constructor on",
    )
    empty = case.values[0][:0]
    observer(empty)
    require(not observer.has_statistics, f"an empty value of shape {tuple(empty.shape)} counts")
    _require_refusal(observer, "no value was observed")
    observer = case.observer(case.values)
    require(observer.has_statistics, "has_statistics is false after a value was observed")
    before = _copied(observer)
    observer(empty)
    changed = _changed(before, _copied(observer))
    require(not changed, f"an empty value changes {', '.join(changed)}")


@law(lambda subject: subject.bad(subject.single(), ["nan", "inf", "-inf"]))
def nan_and_infinity_are_refused(subject: Subject, case: ObserverCase) -> None:
    """If a value holds NaN or infinity, get_qparams raises or warns: no scale is silent."""
    reason = f"the observed value holds {case.values[0].view(-1)[0].item()}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        observer = case.observer(case.values)
    _require_refusal(observer, reason)


@law(Subject.single)
def scales_follow_their_elements(subject: Subject, case: ObserverCase) -> None:
    """If groups of elements change places, their scales do, and nothing else."""
    flat = flatten_for_calibration(case.values[0], case.base_name, case.args)
    shape = flat.shape[1:-1]
    for dimension, size in enumerate(shape):
        if size == 1:
            continue
        straight, rolled = case.observer(), case.observer()
        straight.update_statistics_from_observed(flat)
        rolled.update_statistics_from_observed(flat.roll(1, dimension + 1))
        expected = _tensor(straight.get_qparams(), "scale").float().roll(1, dimension)
        found = _tensor(rolled.get_qparams(), "scale").float()
        require(
            torch.equal(found, expected),
            f"scales do not belong to their elements: after moving group i of dimension "
            f"{dimension} to i + 1, the scales are {short(found)} and not {short(expected)}",
        )


@law(
    lambda subject: subject.single().flatmap(
        lambda case: st.integers(0, 999).map(lambda seed: replace(case, also={"seed": seed}))
    )
)
def places_within_a_scale_do_not_matter(subject: Subject, case: ObserverCase) -> None:
    """Elements that share a scale can change places without changing it, observations likewise.

    Observations keep their order for observers that declare an AVG: these may weigh observations by
    their order. Importance of columns moves with the columns.
    """
    flat = flatten_for_calibration(case.values[0], case.base_name, case.args)
    random = torch.Generator().manual_seed(case.also["seed"])
    observations = torch.randperm(len(flat), generator=random)
    if any(reduction is AVERAGE for reduction in subject.operations.values()):
        observations = torch.arange(len(flat))
    elements = torch.randperm(flat.shape[-1], generator=random)
    moved = flat[observations][..., elements]
    straight, other = case.observer(), case.observer()
    if subject.observer_class.observes_input and case.args.strategy in _BY_COLUMN:
        inputs = torch.rand(1, case.values[0].shape[-1], generator=random)
        straight.observe_input(inputs)
        other.observe_input(inputs.reshape(1, -1, flat.shape[-1])[..., elements].flatten(1))
    straight.update_statistics_from_observed(flat)
    other.update_statistics_from_observed(moved)
    expected, found = straight.get_qparams(), other.get_qparams()
    require(
        _same_scales(expected, found)
        or _equally_good(flat, case.args, expected, found)
        or torch.equal(flat, moved),
        f"the scale is {short(_tensor(expected, 'scale'))}, and "
        f"{short(_tensor(found, 'scale'))} if elements that share it change places "
        "(torch.randperm of the seed); does it look at all of them?",
    )


def _same_scales(one: QParamsDict, other: QParamsDict) -> bool:
    pairs = [(_tensor(one, key).float(), _tensor(other, key).float()) for key in _SCALES]
    return all(torch.allclose(a, b, rtol=1e-3, atol=0) for a, b in pairs)


def _equally_good(
    flat: torch.Tensor, args: QuantizationArgs, one: QParamsDict, other: QParamsDict
) -> bool:
    """Whether both scales lose as much by some measure.

    Sums in another order are rounded differently, so that a search may choose another of two
    candidates that are as good by its own measure.
    """
    first, second = (_differences(flat, args, qparams) for qparams in (one, other))
    return any(
        math.isclose(
            float(first.pow(norm).sum()), float(second.pow(norm).sum()), rel_tol=1e-2, abs_tol=1e-9
        )
        for norm in (1.0, 2.0, 2.4, 3.0)
    )


def _require_refusal(observer: Observer, reason: str) -> None:
    """Raise `BrokenLawError` if the observer gives qparams without a word."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            qparams = observer.get_qparams()
        except ValueError:
            return
        except Exception as error:
            raise BrokenLawError(
                f"{reason}, and get_qparams() raises {type(error).__name__}: {error}; raise a "
                "StatisticsError that says so, as `inlay.observers.require_finite` does"
            ) from error
    if not told:
        scale = short(_tensor(qparams, "scale"))
        raise BrokenLawError(
            f"{reason}, and get_qparams() gives the scale {scale} without a word; check statistics "
            "with `inlay.observers.require_finite` before a scale is made of them"
        )


def _tensor(qparams: QParamsDict, key: str) -> torch.Tensor:
    found = qparams.get(key)
    if not isinstance(found, torch.Tensor):
        raise BrokenLawError(f"get_qparams() gives no {key}, but {found!r}")
    return found


def _differences(flat: torch.Tensor, args: QuantizationArgs, qparams: QParamsDict) -> torch.Tensor:
    """Compute by how much quantizing changes each value, in groups that share a scale."""
    # Each group of elements as a channel: compressed-tensors quantizes those of any strategy.
    groups = flat.movedim(0, -2).flatten(-2).flatten(0, -2)
    scale, zero_point = (_tensor(qparams, key).reshape(-1, 1) for key in _SCALES)
    by_channel = args.model_copy(update={"strategy": "channel", "group_size": None})
    restored: torch.Tensor = fake_quantize(
        groups, scale, zero_point, by_channel, global_scale=qparams.get("global_scale")
    )
    return (restored.float() - groups.float()).abs()


def _name(member: object) -> str:
    return str(getattr(member, "value", member))


def _copied(observer: Observer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in tensors_of(observer).items()}


def _cloned(qparams: QParamsDict) -> dict[str, torch.Tensor]:
    return {key: value.clone() for key, value in qparams.items() if isinstance(value, torch.Tensor)}


def _changed(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> list[str]:
    """Names of the tensors that are not the same, NaN being the same as NaN."""
    names = sorted(before.keys() | after.keys())
    return [name for name in names if not _same(before.get(name), after.get(name))]


def _same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.dtype == other.dtype and torch.equal(
        one.double().nan_to_num(1.5e300), other.double().nan_to_num(1.5e300)
    )


LAWS: tuple[Law[Subject], ...] = (
    scales_have_the_shape_of_their_strategy,
    scales_are_positive_and_zero_points_in_range,
    quantized_values_resemble_the_observed_ones,
    scales_follow_their_elements,
    places_within_a_scale_do_not_matter,
    observing_leaves_the_value_alone,
    statistics_are_not_the_value_itself,
    observers_do_not_share_statistics,
    get_qparams_changes_nothing,
    without_values_there_are_no_qparams,
    nan_and_infinity_are_refused,
)
