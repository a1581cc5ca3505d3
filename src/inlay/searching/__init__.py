"""Search for a mixed-precision recipe that meets a target."""

from inlay.searching.choosing import search
from inlay.searching.found import Found
from inlay.searching.scores import Check, Scores, UnitScore

__all__ = ["Check", "Found", "Scores", "UnitScore", "search"]
