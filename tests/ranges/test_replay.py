"""Searching one group from estimates gives what the definition gives."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples

from inlay.ranges import replay
from inlay.ranges.qparams import qparams_of_range
from inlay.ranges.replay import UNKNOWN, BinnedEstimate, Bounds, Estimate, best_candidate
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
def test_estimates_choose_what_errors_choose(values, patience, below, above) -> None:
    def estimate(index: int) -> Bounds:
        value = values[index]
        if not value < math.inf:
            return UNKNOWN
        return Bounds(value * (1 - below[index]), value * (1 + above[index]))

    chosen = best_candidate(len(values), patience, estimate, values.__getitem__)
    assert chosen == as_defined(values, patience)


@examples(60)
@given(
    fields=st.sampled_from(FORMATS),
    norm=st.sampled_from([1.0, 2.0, 2.4, 3.0, 7.3]),
    patience=st.sampled_from([None, 1, 5]),
    bins=st.sampled_from([None, 2**9, 2**15]),
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
        patch.setattr(replay, "_FEW", 1)
        patch.setattr(replay, "_IN_CACHE", 100)
        if bins is not None:
            patch.setattr(replay, "_MANY", 1)
            patch.setattr(replay, "_BINS", bins)
        replay._table_of.cache_clear()
        found = search(observed)
        replay._table_of.cache_clear()
    for ours, theirs in zip(found, wanted, strict=True):
        assert torch.equal(ours.nan_to_num(nan=12345), theirs.nan_to_num(nan=12345))


@pytest.mark.parametrize("fields", FORMATS)
def test_errors_lie_within_their_bounds(fields) -> None:
    args = make_args({**fields, **TENSOR})
    observed = torch.randn(300, 1, 1000) * torch.randn(1000).exp()
    largest = float(observed.abs().max())
    search = RangeSearch(args=args, shrinks=(1.0, 0.5, 0.1), norm=2.4)
    low, high = observed.amin().reshape(1), observed.amax().reshape(1)
    estimate = Estimate(observed, largest, args, 2.4)
    for shrink in search.shrinks:
        qparams = qparams_of_range(low * shrink, high * shrink, args)
        wanted = float(search.error(observed, low * shrink, high * shrink))
        low_error, high_error = estimate(*map(float, qparams))
        assert low_error <= wanted <= high_error
        assert high_error < low_error * 1.01


BINNED = [
    pytest.param(lambda x: x, id="normal"),
    pytest.param(lambda x: x**5, id="long tails"),
    pytest.param(lambda x: x + 3, id="one side"),
    pytest.param(lambda x: (x * 40).round() + 0.5, id="between steps"),
    pytest.param(lambda x: x * 1e-4, id="small"),
]


def binned(observed, args, norm, factors=(1.0, 0.97, 0.9, 0.8), **changes):
    ends = torch.aminmax(observed)
    tensor = torch.tensor(factors)
    scales, zeros = (
        each.flatten() for each in qparams_of_range(ends.min * tensor, ends.max * tensor, args)
    )
    given = {
        "ends": (float(ends.min), float(ends.max)),
        "qparams": (scales.tolist(), zeros.tolist()),
        **changes,
    }
    estimate = BinnedEstimate(observed, shrinks=factors, args=args, norm=norm, **given)
    return estimate, scales.double(), zeros.double()


@pytest.mark.parametrize("shaped", BINNED)
@pytest.mark.parametrize("norm", [2.0, 2.4, 3.0])
@pytest.mark.parametrize("fields", FORMATS)
def test_binned_errors_differ_as_errors_do(fields, norm, shaped) -> None:
    """Their bounds hold for differences: what all candidates have in common may be off."""
    args = make_args({**fields, **TENSOR})
    observed = shaped(torch.randn(70, 1, 1000))
    estimate, scales, zeros = binned(observed, args, norm)
    low, high = format_range(args)
    unit = float(scales[0]) * (high - low)
    values, exact = observed.double().flatten(), []
    for scale, zero in zip(scales, zeros, strict=True):
        quantized = ((values / scale).round().clamp(low - zero, high - zero)) * scale
        exact.append(float(((quantized - values) / unit).abs().pow(norm).sum()))
    for one in range(4):
        assert estimate(one) != UNKNOWN
        for other in range(one):
            off = sum(estimate(index).high - estimate(index).low for index in (one, other)) / 2
            centre = [sum(estimate(index)) / 2 for index in (one, other)]
            assert abs((centre[0] - centre[1]) - (exact[one] - exact[other])) <= off
            assert off < 0.02 * max(exact[one], exact[other])


def test_scales_that_are_not_what_is_tabulated_leave_it_open() -> None:
    args = make_args({**INT8, **TENSOR})
    observed = torch.randn(70, 1, 1000)
    assert binned(observed, args, 2.4, (1.0, 0.5))[0](1) != UNKNOWN
    scale = float(observed.abs().max()) / 127.5
    for wrong in (scale * 0.501, 0.0, math.inf, math.nan):
        qparams = [scale, wrong], [0.0, 0.0]
        assert binned(observed, args, 2.4, (1.0, 0.5), qparams=qparams)[0](0) == UNKNOWN
    for all_wrong in (0.0, 1e-30, 1e30, math.inf, math.nan):
        qparams = [all_wrong], [0.0]
        assert binned(observed, args, 2.4, (1.0,), qparams=qparams)[0](0) == UNKNOWN
    outside = -math.inf, 1.0
    assert binned(observed, args, 2.4, (1.0,), ends=outside)[0](0) == UNKNOWN


@pytest.mark.parametrize("rows", [64, 512])  # too few for bins, and enough
def test_nearly_nothing_is_computed_as_defined(monkeypatch, rows: int) -> None:
    observed = torch.randn(rows, 1, 512) * torch.randn(512).exp()
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
