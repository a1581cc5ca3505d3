"""Targets, corrections by what was measured, and formats as they are typed."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples

from inlay.compensation.settings import GPTQ
from inlay.errors import ConfigurationError
from inlay.options import SearchOptions
from inlay.report.data import Estimate
from inlay.searching import Check, Scores, UnitScore
from inlay.searching.formats import parse_formats
from inlay.searching.targets import Target, choose, corrected, points_of

LOSS = st.floats(1e-4, 10)


def scores(*costs: float, checks: tuple[Check, ...] = ()) -> Scores:
    """Return the scores of units of growing size, with formats of 4 and 8 bits."""
    units = tuple(
        UnitScore(
            layers=(f"layers.{number}",),
            targets=(f"layers.{number}",),
            weights=100 * (number + 1),
            places=(0, 1),
            bits=(4, 8),
            sizes=(60 * (number + 1), 110 * (number + 1)),
            costs=(cost, 0.0),
        )
        for number, cost in enumerate(costs)
    )
    return Scores(
        model="m",
        data="rows",
        tokens=1,
        formats=("W4A16", "W8A16"),
        forward_only=False,
        kept=1000,
        units=units,
        left={},
        weights={},
        settings={},
        checks=checks,
    )


def check(predicted: float, kl: float) -> Check:
    return Check(choice=(), predicted=predicted, kl=Estimate(value=kl))


@examples(60)
@given(pairs=st.dictionaries(LOSS, LOSS, min_size=1, max_size=4), predicted=LOSS)
def test_corrections_keep_to_what_was_measured(pairs: dict[float, float], predicted: float) -> None:
    known = scores(1.0, checks=tuple(check(*pair) for pair in pairs.items()))
    for loss, kl in pairs.items():
        assert corrected(known, loss) == pytest.approx(kl)
    ratios = [kl / loss for loss, kl in pairs.items()]
    found = corrected(known, predicted) / predicted
    assert min(ratios) * (1 - 1e-9) <= found <= max(ratios) * (1 + 1e-9)
    assert corrected(scores(1.0), predicted) == predicted


@examples(60)
@given(costs=st.lists(LOSS, min_size=1, max_size=5), bits=st.floats(4, 9))
def test_targets_are_kept(costs: list[float], bits: float) -> None:
    known = scores(*costs)
    choice = choose(known, Target("bits", bits))
    assert known.bits_of(choice) <= bits + 1e-9
    size = known.size_of(choice)
    assert known.size_of(choose(known, Target("size", size))) <= size
    ends = [known.bits_of(point) for point in (points_of(known)[0], points_of(known)[-1])]
    assert ends == [4, 8]


def test_decimals_reach_what_they_say() -> None:
    """Of ten equal units, 4.4 bits let one have 8, though 4.4 is stored as a little less."""
    known = scores(1.0)
    unit = known.units[0]
    ten = Scores(**{**vars(known), "units": (unit,) * 10})
    assert ten.bits_of(choose(ten, Target("bits", 4.4))) == pytest.approx(4.4)
    with pytest.raises(ConfigurationError, match=r"500 bytes .* the smallest formats take 1.06 kB"):
        choose(known, Target("size", 500))


def test_targets_are_read() -> None:
    assert Target.of(SearchOptions(size="2.1GB")) == Target("size", 2_100_000_000)
    assert Target.of(SearchOptions(bits=5)) == Target("bits", 5)
    for value in (0, -1, math.inf, math.nan):
        with pytest.raises(ConfigurationError, match="max_kl must be a positive number"):
            Target.of(SearchOptions(max_kl=value))


def test_formats_are_read_as_they_are_typed() -> None:
    text = "W4A16:group_size=64,symmetric=false, W8A16:num_bits=6 ,NVFP4A16,bf16"
    formats, gptq = parse_formats(text, "best")
    four, six, nv, plain = formats
    assert (four.scheme.weights.group_size, four.scheme.weights.symmetric) == (64, False)
    assert (six.scheme.weights.num_bits, six.scheme.weights.observer) == (6, None)
    assert [each.bits(2) for each in formats] == [4, 6, 4, 16]
    assert four.scheme.weights.observer == nv.scheme.weights.observer == "imatrix_mse"
    assert (plain.scheme, plain.is_plain) == (None, True)
    assert (four.fits(128), four.fits(96), plain.fits(7)) == (True, False, True)
    assert gptq == GPTQ()
    formats, gptq = parse_formats(text, "plain")
    assert (formats[0].scheme.weights.observer, gptq) == (None, None)
