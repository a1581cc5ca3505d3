"""The solver: its choices against those of brute force."""

import itertools

from hypothesis import given
from hypothesis import strategies as st
from profiles import examples

from inlay.searching.solving import Option, frontier, solve, total

OPTIONS = st.builds(Option, st.integers(1, 12), st.integers(0, 20).map(float))
ITEMS = st.lists(st.lists(OPTIONS, min_size=1, max_size=4), min_size=1, max_size=5)


def every_choice(items: list[list[Option]]) -> list[Option]:
    places = itertools.product(*(range(len(options)) for options in items))
    return [total(items, choice) for choice in places]


@examples(300)
@given(items=ITEMS, budget=st.integers(0, 60))
def test_choices_are_the_best(items: list[list[Option]], budget: int) -> None:
    affordable = [each.cost for each in every_choice(items) if each.size <= budget]
    found = solve(items, budget)
    if not affordable:
        assert found is None
    else:
        assert found is not None
        assert total(items, found).size <= budget
        assert total(items, found).cost == min(affordable)


@examples(100)
@given(items=ITEMS)
def test_the_frontier_holds_best_choices_from_the_smallest_to_the_cheapest(
    items: list[list[Option]],
) -> None:
    points = [total(items, choice) for choice in frontier(items)]
    everything = every_choice(items)
    assert points[0].size == min(each.size for each in everything)
    assert points[-1].cost == min(each.cost for each in everything)
    for point, following in itertools.pairwise(points):
        assert point.size < following.size
        assert point.cost > following.cost
    for point in points:
        assert point.cost == min(each.cost for each in everything if each.size <= point.size)


def test_many_items_of_odd_sizes() -> None:
    """Sizes without a common divisor, where a table over sizes would be too large."""
    primes = (1_000_003, 999_983, 2_000_003, 1_299_709)
    items = [
        [
            Option(4 * primes[n % 4], 5.0 / (1 + n)),
            Option(8 * primes[n % 4], 0.1 / (1 + n)),
            Option(16 * primes[n % 4], 0.0),
        ]
        for n in range(400)
    ]
    budget = round(1.3 * sum(options[0].size for options in items))
    found = solve(items, budget)
    assert found is not None
    assert total(items, found).size <= budget
    points = [total(items, choice) for choice in frontier(items)]
    after = next(n for n, point in enumerate(points) if point.size > budget)
    low, high = points[after - 1], points[after]
    # No choice is below the hull of all.
    part = (budget - low.size) / (high.size - low.size)
    bound = low.cost + part * (high.cost - low.cost)
    assert bound <= total(items, found).cost <= low.cost
