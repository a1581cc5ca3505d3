"""Searching one group from estimates gives what the definition gives."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples

from inlay.ranges import replay
from inlay.ranges.qparams import qparams_of_range
from inlay.ranges.replay import UNKNOWN, Bounds, Estimate, best_candidate
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
    exponent=st.integers(-30, 30),
    spread=st.sampled_from([0.0, 1.0, 3.0]),
    shape=st.sampled_from([(7, 1, 5), (1, 1, 40), (64, 1, 96)]),
    kind=st.sampled_from(["noise", "integers", "zeros", "infinite", "not a number"]),
    expand=st.sampled_from([1.0, 1.1]),
)
def test_the_range_is_that_of_the_definition(
    fields, norm, patience, exponent, spread, shape, kind, expand
) -> None:
    observed = torch.randn(shape) * torch.randn(shape[-1]).mul(spread).exp() * 2.0**exponent
    if kind == "integers":  # many values halfway between two steps
        observed = observed.round()
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
        found = search(observed)
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
        low_error, high_error = estimate(*qparams)
        assert low_error <= wanted <= high_error
        assert high_error < low_error * 1.01


def test_nearly_nothing_is_computed_as_defined(monkeypatch) -> None:
    observed = torch.randn(64, 1, 512) * torch.randn(512).exp()
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
