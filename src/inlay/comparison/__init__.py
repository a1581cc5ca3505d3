"""Compare two models: their predictions, their weights, and the files around them."""

from inlay.comparison.comparing import compare
from inlay.comparison.result import ModelComparison

__all__ = ["ModelComparison", "compare"]
