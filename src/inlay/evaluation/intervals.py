"""Averages over rows of data, with intervals that say how much they depend on the rows."""

from collections.abc import Callable, Mapping
from functools import cached_property

import torch

from inlay.report.data import Estimate, Interval

__all__ = ["CONFIDENCE", "RowSums", "Totals"]

CONFIDENCE = 0.95
_RESAMPLES = 2000
_CHUNK = 1 << 20  # numbers drawn at a time

# Sums over rows by name: numbers, or one for each resample.
Totals = Mapping[str, torch.Tensor]


class RowSums:
    """Sums of some quantities for each row of the data.

    Tokens of a row depend on each other, so rows are what a bootstrap resamples. An average is a
    ratio of two sums: rows weigh by their tokens.
    """

    def __init__(self, *names: str) -> None:
        self._names = names
        self._batches: list[torch.Tensor] = []

    def add(self, rows: torch.Tensor, **values: torch.Tensor) -> None:
        """Add the positions of further rows.

        :param rows: the row of each position, numbered from 0 in each call
        :param values: the quantities, a number for each position
        """
        if len(rows):
            columns = torch.stack([values[name].double() for name in self._names], dim=-1)
            sums = columns.new_zeros(int(rows.max()) + 1, len(self._names))
            self._batches.append(sums.index_add_(0, rows, columns).cpu())
            self.__dict__.pop("_resampled", None)

    def total(self, name: str) -> float:
        return float(self._sums.sum(0)[self._names.index(name)])

    def estimate(self, of: Callable[[Totals], torch.Tensor]) -> Estimate:
        """Return a function of the sums, with a percentile bootstrap interval over rows.

        Resamples without a value of the function, such as those without a label, are skipped.
        """
        value = float(of(self._named(self._sums.sum(0))))
        spread = of(self._named(self._resampled)) if len(self._sums) > 1 else torch.empty(0)
        spread = spread[~spread.isnan()]
        if len(spread) == 0:
            return Estimate(value=value)
        outside = (1 - CONFIDENCE) / 2
        # Infinities have a rank, but no number lies between them and another.
        low, high = (
            float(torch.quantile(spread, share, interpolation="nearest"))
            for share in (outside, 1 - outside)
        )
        return Estimate(value=value, interval=Interval(low=low, high=high))

    def _named(self, sums: torch.Tensor) -> Totals:
        return dict(zip(self._names, sums.unbind(-1), strict=True))

    @property
    def _sums(self) -> torch.Tensor:
        if not self._batches:
            return torch.zeros(0, len(self._names), dtype=torch.float64)
        self._batches = [torch.cat(self._batches)]
        return self._batches[0]

    @cached_property
    def _resampled(self) -> torch.Tensor:
        """The sums of resampled rows, the same in every run."""
        sums, generator = self._sums, torch.Generator().manual_seed(0)
        step = max(1, _CHUNK // len(sums))
        drawn = [
            torch.randint(
                len(sums), (min(step, _RESAMPLES - start), len(sums)), generator=generator
            )
            for start in range(0, _RESAMPLES, step)
        ]
        return torch.cat([sums[rows].sum(1) for rows in drawn])
