"""Choose an option for each item: the least cost whose size is within a budget."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

__all__ = ["Choice", "Option", "frontier", "solve", "total"]

# Float sums in different orders differ by about this share; bounds allow for that.
_SLACK = 1e-9

Choice = tuple[int, ...]  # the place of the chosen option, for each item


@dataclass(frozen=True)
class Option:
    """One of several alternatives: how much of the budget it takes, and its cost."""

    size: int
    cost: float


@dataclass(frozen=True)
class _Step:
    """A move of one item to a larger option of less cost, on the convex hull of its options."""

    item: int
    to: int
    size: int
    gain: float

    @property
    def slope(self) -> float:
        return self.gain / self.size


def total(items: Sequence[Sequence[Option]], choice: Choice) -> Option:
    """Return the size and the cost of a choice."""
    chosen = [options[place] for options, place in zip(items, choice, strict=True)]
    return Option(sum(each.size for each in chosen), sum(each.cost for each in chosen))


def frontier(items: Sequence[Sequence[Option]]) -> list[Choice]:
    """Return the choices on the convex hull of all sizes and costs, from the smallest on.

    No choice of their size or less costs less.
    """
    choice = [_smallest(options) for options in items]
    found = [tuple(choice)]
    for step in _steps(items):
        choice[step.item] = step.to
        found.append(tuple(choice))
    return found


def solve(items: Sequence[Sequence[Option]], budget: int) -> Choice | None:
    """Return the choice of least cost whose size is at most the budget; None if there is none.

    The answer is exact. With a price on size, each item has a best option, and the price of the
    linear relaxation leaves a small gap between the bound and a greedy choice. Only choices whose
    loss against the best options fits into this gap can be better. They are listed item by item,
    and of two lists the larger one that costs more is dropped.
    """
    choice = [_smallest(options) for options in items]
    left = budget - total(items, tuple(choice)).size
    if left < 0:
        return None
    price = 0.0
    for step in _steps(items):
        is_next = items[step.item][choice[step.item]].size + step.size == (
            items[step.item][step.to].size
        )
        if is_next and step.size <= left:
            choice[step.item], left = step.to, left - step.size
        elif not price:
            price = step.slope  # of the step that the relaxation takes in part
    greedy = tuple(choice)
    return _improved(items, budget, price, greedy)


def _smallest(options: Sequence[Option]) -> int:
    return min(range(len(options)), key=lambda place: (options[place].size, options[place].cost))


def _steps(items: Sequence[Sequence[Option]]) -> list[_Step]:
    """Return the steps along the hulls of all items, the most gain for the size first."""
    steps = [step for item, options in enumerate(items) for step in _hull(item, options)]
    return sorted(steps, key=lambda step: -step.slope)


def _hull(item: int, options: Sequence[Option]) -> list[_Step]:
    """Return the steps along the lower convex hull of an item's options; each gains less."""
    steps: list[_Step] = []
    place = _smallest(options)
    while True:
        here = options[place]
        further = [
            _Step(item, to, each.size - here.size, here.cost - each.cost)
            for to, each in enumerate(options)
            if each.size > here.size and each.cost < here.cost
        ]
        if not further:
            return steps
        steps.append(max(further, key=lambda step: (step.slope, step.size)))
        place = steps[-1].to


def _improved(
    items: Sequence[Sequence[Option]], budget: int, price: float, greedy: Choice
) -> Choice:
    """Return the best choice, given a good one and the price of size."""
    best = total(items, greedy).cost
    priced = [[each.cost + price * each.size for each in options] for options in items]
    least = [min(costs) for costs in priced]
    scale = sum(abs(each) for each in least) + price * budget + abs(best)
    gap = best - (sum(least) - price * budget) + _SLACK * scale
    losses = [[cost - low for cost in costs] for costs, low in zip(priced, least, strict=True)]
    # Items that lose most by a second choice come first, so that few lists are kept.
    order = sorted(range(len(items)), key=lambda item: -sorted(losses[item])[:2][-1])
    needed = sum(min(each.size for each in options) for options in items)
    size = torch.zeros(1, dtype=torch.int64)
    cost, loss = torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    trail: list[tuple[torch.Tensor, torch.Tensor]] = []
    for item in order:
        options = items[item]
        needed -= min(each.size for each in options)
        sizes = torch.tensor([each.size for each in options])
        costs = torch.tensor([each.cost for each in options], dtype=torch.float64)
        lost = torch.tensor(losses[item], dtype=torch.float64)
        size = (size[:, None] + sizes).flatten()
        cost = (cost[:, None] + costs).flatten()
        loss = (loss[:, None] + lost).flatten()
        kept = ((loss <= gap) & (size + needed <= budget)).nonzero().flatten()
        kept = kept[_undominated(size[kept], cost[kept])]
        trail.append((kept // len(options), kept % len(options)))
        size, cost, loss = size[kept], cost[kept], loss[kept]
    if not len(cost) or float(cost.min()) >= best:
        return greedy
    state = int(cost.argmin())
    choice = [0] * len(items)
    for item, (parents, places) in zip(reversed(order), reversed(trail), strict=True):
        choice[item] = int(places[state])
        state = int(parents[state])
    return tuple(choice)


def _undominated(size: torch.Tensor, cost: torch.Tensor) -> torch.Tensor:
    """Return the places of those that no other one matches in both size and cost."""
    by_cost = torch.argsort(cost, stable=True)
    order = by_cost[torch.argsort(size[by_cost], stable=True)]
    sorted_cost = cost[order]
    if not len(order):
        return order
    lowest = torch.cummin(sorted_cost, 0).values
    before = torch.cat([lowest.new_full((1,), torch.inf), lowest[:-1]])
    return order[sorted_cost < before]
