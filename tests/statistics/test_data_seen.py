"""What data a run has seen: known again, put together, and kept."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inlay.statistics.data_seen import DataSeen

numbers = st.sets(st.integers(0, 60))


def seen(batches: set[int]) -> DataSeen:
    found = DataSeen(fingerprints={number: f"{number:x}" for number in sorted(batches)})
    for _ in batches:
        found = found.after(samples=1, tokens=2, padding=3)
    return found


@given(numbers)
def test_json_keeps_it(batches: set[int]) -> None:
    known = seen(batches)
    assert DataSeen.from_plain(json.loads(json.dumps(known.to_plain()))) == known
    assert not known.is_unknown


@pytest.mark.parametrize(("start", "step"), [(0, 1), (3, 4)])
def test_the_batches_of_a_rank_take_a_line(start: int, step: int) -> None:
    assert seen(set(range(start, 100, step))).to_plain()["numbers"] == [
        [start, max(range(start, 100, step)) + 1, step]
    ]


@given(numbers, st.integers(1, 5))
def test_the_parts_of_ranks_are_the_whole(batches: set[int], ranks: int) -> None:
    parts = [seen({n for n in batches if n % ranks == rank}) for rank in range(ranks)]
    assert DataSeen.of_all(parts) == seen(batches)


@given(numbers, numbers)
def test_batches_that_count_twice_are_not_known_again(one: set[int], other: set[int]) -> None:
    assert DataSeen.of_all([seen(one), seen(other)]).is_unknown == bool(one & other)


def test_an_older_form_is_read_and_not_known_again() -> None:
    counts = {"batches": 2, "samples": 2, "tokens": 5, "padding_tokens": 0}
    found = DataSeen.from_plain({**counts, "digest": "abc"})
    assert found.tokens == 5
    assert found.is_unknown
