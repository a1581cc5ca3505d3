"""Intervals of averages over rows, against rows whose average is known."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from inlay.evaluation.intervals import RowSums, Totals
from inlay.evaluation.measures import Choices
from inlay.report.data import Estimate


def average(sums: Totals) -> torch.Tensor:
    return sums["value"] / sums["count"]


def estimated(*rows: torch.Tensor) -> Estimate:
    found = RowSums("count", "value")
    for row in rows:
        found.add(torch.zeros(len(row), dtype=torch.long), count=torch.ones(len(row)), value=row)
    return found.estimate(average)


@given(st.lists(st.lists(st.floats(-9, 9), min_size=1, max_size=4), min_size=2, max_size=6))
def test_the_average_is_that_of_all_positions_and_lies_in_its_interval(rows: list) -> None:
    found = estimated(*map(torch.tensor, rows))
    everything = torch.tensor([value for row in rows for value in row], dtype=torch.float64)
    assert found.value == pytest.approx(float(everything.mean()), abs=1e-5)
    averages = [sum(row) / len(row) for row in rows]
    assert min(averages) - 1e-5 <= found.interval.low <= found.interval.high
    assert found.interval.high <= max(averages) + 1e-5


def test_rows_in_one_batch_or_in_several_are_the_same() -> None:
    values, owners = torch.randn(12), torch.arange(4).repeat_interleave(3)
    together = RowSums("count", "value")
    together.add(owners, count=torch.ones(12), value=values)
    assert together.estimate(average) == estimated(*values.split(3))


def test_nineteen_in_twenty_intervals_hold_the_truth() -> None:
    """Of 100 samples of 32 rows, whose positions depend on each other."""
    torch.manual_seed(0)
    hits = 0
    for _ in range(100):
        rows = torch.randn(32, 1) + 0.1 * torch.randn(32, 5)
        interval = estimated(*rows).interval
        hits += interval.low <= 0 <= interval.high
    assert 89 <= hits <= 99


def test_dependent_positions_do_not_narrow_an_interval() -> None:
    values = torch.randn(20)
    alone, repeated = (estimated(*values.unsqueeze(1).expand(20, size)) for size in (1, 50))
    assert repeated.interval.low == pytest.approx(alone.interval.low)
    assert repeated.interval.high == pytest.approx(alone.interval.high)


def test_one_row_has_no_interval_and_infinity_is_a_number() -> None:
    assert estimated(torch.randn(9)).interval is None
    found = estimated(torch.tensor([1.0]), torch.tensor([math.inf]))
    assert (found.value, found.interval.low, found.interval.high) == (math.inf, 1.0, math.inf)


def test_resamples_without_a_label_are_left_out() -> None:
    measure = Choices()
    labels = torch.tensor([1, -100, -100])
    measure.add(torch.randn(3, 4), torch.randn(3, 4), labels)
    interval = measure.estimates()["perplexity_before"].interval
    assert interval.low == interval.high


def test_the_ratio_of_paired_rows_is_known_better_than_its_parts() -> None:
    """Texts differ more than models do."""
    torch.manual_seed(0)
    before = torch.randn(30, 9) * torch.linspace(0.1, 5, 30).unsqueeze(1)
    measure = Choices()
    measure.add(before, 1.01 * before, torch.randint(0, 9, (30,)))
    found = measure.estimates()
    relative = {
        name: (each.interval.high - each.interval.low) / each.value for name, each in found.items()
    }
    assert relative["perplexity_ratio"] < 0.1 * relative["perplexity_before"]
