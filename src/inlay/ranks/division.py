"""What each process of a group does: which batches it takes, and which parts of a piece of work."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from inlay.ranks.identity import rank, size

__all__ = ["Part", "share"]

_T = TypeVar("_T")


@dataclass(frozen=True)
class Part:
    """The part of one process in a sequence that all processes know: every `size`-th item.

    Parts are disjoint, together they are everything, and no two differ by more than one item.
    """

    rank: int = 0
    size: int = 1

    @classmethod
    def own(cls) -> "Part":
        """The part of this process."""
        return cls(rank(), size())

    def takes(self, number: int) -> bool:
        """Whether the item with this number, counted from 0, belongs to the part."""
        return number % self.size == self.rank

    def number(self, place: int) -> int:
        """The number of the item that stands at this place of the part."""
        return place * self.size + self.rank


def share(costs: Mapping[_T, float], part: Part, together: Iterable[Iterable[_T]] = ()) -> list[_T]:
    """The pieces of work that a process does, in the order given, so that all have about the same.

    Every process computes the same division, and each piece is in exactly one share: the largest
    pieces are given out first, each to the process that has least to do.

    :param costs: pieces of work, with what they cost in any unit
    :param together: pieces that the same process has to do
    """
    leader = {piece: piece for piece in costs}

    def unit(piece: _T) -> _T:
        while leader[piece] != piece:
            leader[piece] = leader[leader[piece]]  # shorten the way for those who ask next
            piece = leader[piece]
        return piece

    for pieces in together:
        known = [piece for piece in pieces if piece in costs]
        for piece in known[1:]:
            leader[unit(piece)] = unit(known[0])
    unit_of = {piece: unit(piece) for piece in costs}
    totals: dict[_T, float] = {}
    for piece, cost in costs.items():
        totals[unit_of[piece]] = totals.get(unit_of[piece], 0.0) + cost
    loads = [0.0] * part.size
    taken_by: dict[_T, int] = {}
    for one in sorted(totals, key=lambda one: -totals[one]):
        least = loads.index(min(loads))
        loads[least] += totals[one]
        taken_by[one] = least
    return [piece for piece in costs if taken_by[unit_of[piece]] == part.rank]
