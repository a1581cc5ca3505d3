"""Searching one group from bounds of its errors gives what the definition gives."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples

from inlay.ranges import estimates
from inlay.ranges.estimates import UNKNOWN, Bounds, best_candidate, estimate
from inlay.ranges.qparams import qparams_of_range
from inlay.ranges.rounding import format_range
from inlay.ranges.search import RangeSearch
from inlay.testing.strategies import INT4, INT8, make_args

TENSOR = {"strategy": "tensor"}
FORMATS = [INT8, INT4, {**INT8, "symmetric": False}]


@st.composite
def errors(draw: st.DrawFn) -> list[float]:
    """Errors of candidates, often equal or nearly so, and now and then not finite."""
    base = draw(st.floats(1e-3, 1e3))
    near = st.integers(-3, 3).map(lambda steps: base * (1 + steps * 1e-6))
    other = st.one_of(st.floats(0, 1e4), st.sampled_from([math.inf, math.nan, 0.0]))
    return draw(st.lists(st.one_of(near, other), min_size=1, max_size=20))


def as_defined(values: list[float], patience: int | None) -> int | None:
    best, least, without_gain = None, math.inf, 0
    for index, value in enumerate(values):
        if value < least:
            best, least, without_gain = index, value, 0
        else:
            without_gain += 1
        if patience is not None and without_gain >= patience:
            break
    return best


@examples(200)
@given(
    values=errors(),
    patience=st.one_of(st.none(), st.integers(1, 6)),
    below=st.lists(st.floats(0, 1e-6), min_size=20, max_size=20),
    above=st.lists(st.floats(0, 1e-6), min_size=20, max_size=20),
)
def test_bounds_choose_what_errors_choose(values, patience, below, above) -> None:
    bounds = [
        Bounds(value * (1 - low), value * (1 + high)) if value < math.inf else UNKNOWN
        for value, low, high in zip(values, below, above, strict=False)
    ]
    chosen = best_candidate(bounds, patience, values.__getitem__)
    assert chosen == as_defined(values, patience)


@examples(60)
@given(
    fields=st.sampled_from(FORMATS),
    norm=st.sampled_from([1.0, 2.0, 2.4, 3.0, 7.3]),
    patience=st.sampled_from([None, 1, 5]),
    bins=st.sampled_from([2**9, 2**15]),
    exponent=st.integers(-30, 30),
    spread=st.sampled_from([0.0, 1.0, 3.0]),
    shape=st.sampled_from([(7, 1, 5), (1, 1, 40), (64, 1, 96)]),
    kind=st.sampled_from(
        ["noise", "integers", "halves", "one large", "zeros", "infinite", "not a number"]
    ),
    expand=st.sampled_from([1.0, 1.1]),
)
def test_the_range_is_that_of_the_definition(
    fields, norm, patience, bins, exponent, spread, shape, kind, expand
) -> None:
    observed = torch.randn(shape) * torch.randn(shape[-1]).mul(spread).exp() * 2.0**exponent
    if kind == "integers":  # many values halfway between two steps
        observed = observed.round()
    elif kind == "halves":  # of the steps of the first candidate
        step = observed.abs().max() / 127.5
        observed = ((observed / step).round() + 0.5) * step
    elif kind == "one large":
        observed[-1, 0, -1] = 3000 * observed.abs().max()
    elif kind == "zeros":
        observed.zero_()
    elif kind != "noise":
        observed[0, 0, 0] = math.inf if kind == "infinite" else math.nan
    shrinks = tuple(1 - step / 30 for step in range(25))
    args = make_args({**fields, **TENSOR})
    search = RangeSearch(args=args, shrinks=shrinks, norm=norm, patience=patience, expand=expand)
    wanted = search.specification(observed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(estimates, "_MANY", 1)
        patch.setattr(estimates, "_BINS", bins)
        found = search(observed)
    for ours, theirs in zip(found, wanted, strict=True):
        assert torch.equal(ours.nan_to_num(nan=12345), theirs.nan_to_num(nan=12345))


SHAPED = [
    pytest.param(lambda x: x, id="normal"),
    pytest.param(lambda x: x**5, id="long tails"),
    pytest.param(lambda x: x + 3, id="one side"),
    pytest.param(lambda x: (x * 40).round() + 0.5, id="between steps"),
    pytest.param(lambda x: x * 1e-4, id="small"),
]


def bounds_of(observed, args, norm, factors=(1.0, 0.97, 0.9, 0.8), **changes):
    ends = torch.aminmax(observed)
    tensor = torch.tensor(factors)
    scales, zeros = (
        each.flatten().tolist()
        for each in qparams_of_range(ends.min * tensor, ends.max * tensor, args)
    )
    given = {
        "largest": float(observed.abs().max()),
        "scales": scales,
        "zero_points": zeros,
        **changes,
    }
    return estimate(observed, args=args, norm=norm, **given), scales, zeros


@pytest.mark.parametrize("shaped", SHAPED)
@pytest.mark.parametrize("norm", [2.0, 2.4, 3.0])
@pytest.mark.parametrize("fields", FORMATS)
def test_errors_lie_within_their_bounds(fields, norm, shaped) -> None:
    args = make_args({**fields, **TENSOR})
    observed = shaped(torch.randn(70, 1, 1000))
    bounds, scales, zeros = bounds_of(observed, args, norm)
    search = RangeSearch(args=args, shrinks=(1.0, 0.97, 0.9, 0.8), norm=norm)
    low, high = observed.amin().reshape(1), observed.amax().reshape(1)
    width = 2 * float(observed.abs().max()) / estimates._BINS
    first, last = format_range(args)
    values = observed.double().flatten()
    for bound, scale, zero, shrink in zip(bounds, scales, zeros, search.shrinks, strict=True):
        quantized = ((values / scale).round().clamp(first - zero, last - zero)) * scale
        exact = float(((quantized - values) / width).abs().pow(norm).sum())
        as_defined = float(search.error(observed, low * shrink, high * shrink)) / width**norm
        for error in (exact, as_defined):
            assert bound.low <= error <= bound.high
        assert bound.high - bound.low < 0.02 * exact


@pytest.mark.parametrize("place", [0.0, 1e-4, 0.25, 0.5, 0.75, 0.9999])
@pytest.mark.parametrize("fields", FORMATS)
def test_bounds_hold_in_a_bin_with_the_border_of_two_steps(fields, place) -> None:
    """Values lie at both ends of the bin, so that their mean hides how far from the border."""
    args = make_args({**fields, **TENSOR})
    steps = 100 if args.num_bits == 8 else 6
    border, bins = steps - 1.5, estimates._BINS / 2
    number = math.floor(border / steps * bins)
    width = border / (number + place)
    largest = width * bins
    ends = (number + torch.tensor([0.001, 0.999])) * width
    observed = torch.cat([ends.repeat(1000), torch.tensor([largest])]).reshape(1, 1, -1)
    zero = 0.0 if args.symmetric else -args.num_bits
    (bound,) = estimate(observed, largest, [1.0], [zero], args, 2.4)
    low, high = (end - zero for end in format_range(args))
    values = observed.double().flatten()
    error = (values.round().clamp(low, high) - values).abs() / width
    assert bound.low <= float(error.pow(2.4).sum()) <= bound.high


def test_scales_that_are_too_small_or_extreme_leave_errors_open() -> None:
    args = make_args({**INT8, **TENSOR})
    observed = torch.randn(70, 1, 1000)
    assert bounds_of(observed, args, 2.4, (1.0, 0.5))[0][1] != UNKNOWN
    largest = float(observed.abs().max())
    for scale in (largest / 1e5, 0.0, 1e-30, 1e30, math.inf, math.nan):
        bounds, *_ = bounds_of(observed, args, 2.4, (1.0,), scales=[scale], zero_points=[0.0])
        assert bounds == [UNKNOWN]
    for wrong in (0.0, math.inf, math.nan):
        assert bounds_of(observed, args, 2.4, (1.0,), largest=wrong)[0] == [UNKNOWN]


def test_nearly_nothing_is_computed_as_defined(monkeypatch) -> None:
    observed = torch.randn(512, 1, 512) * torch.randn(512).exp()
    search = RangeSearch(
        args=make_args({**INT8, **TENSOR}),
        shrinks=tuple(1 - step / 100 for step in range(20)),
        norm=2.4,
        patience=5,
    )
    wanted = search.specification(observed)
    error, calls = RangeSearch.error, []
    monkeypatch.setattr(RangeSearch, "error", lambda *args: calls.append(args) or error(*args))
    assert search(observed) == wanted
    assert len(calls) <= 4  # of 20
