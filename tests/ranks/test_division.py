"""Who does what: everything is done, and once."""

from hypothesis import given
from hypothesis import strategies as st

from inlay.ranks.division import Part, share

sizes = st.integers(1, 6)
costs = st.lists(st.floats(0, 100), max_size=20).map(lambda found: dict(enumerate(found)))


@given(st.integers(0, 40), sizes)
def test_parts_are_disjoint_complete_and_even(items: int, size: int) -> None:
    parts = [[n for n in range(items) if Part(rank, size).takes(n)] for rank in range(size)]
    assert sorted(n for part in parts for n in part) == list(range(items))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    for rank, part in enumerate(parts):
        assert part == [Part(rank, size).number(place) for place in range(len(part))]


@given(costs, sizes, st.lists(st.sets(st.integers(0, 25), max_size=4), max_size=4))
def test_each_piece_is_in_one_share(costs: dict, size: int, together: list[set[int]]) -> None:
    shares = [share(costs, Part(rank, size), together) for rank in range(size)]
    assert sorted(piece for own in shares for piece in own) == sorted(costs)
    for pieces in together:
        assert sum(1 for own in shares if pieces & set(own)) <= 1


@given(costs, sizes)
def test_no_share_is_larger_than_it_has_to_be(costs: dict, size: int) -> None:
    """The largest exceeds an even division by at most one piece."""
    loads = [sum(costs[p] for p in share(costs, Part(rank, size))) for rank in range(size)]
    largest = max(costs.values(), default=0)
    assert max(loads) <= sum(costs.values()) / size + largest + 1e-6


def test_one_process_has_it_all() -> None:
    assert share({"a": 1.0, "b": 9.0, "c": 3.0}, Part()) == ["a", "b", "c"]
