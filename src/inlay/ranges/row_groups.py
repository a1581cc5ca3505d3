"""Reduce the rows of a value part by part, where rows of one part stand side by side."""

from dataclasses import dataclass

import torch

__all__ = ["RowGroups", "beside"]


@dataclass(frozen=True)
class RowGroups:
    """How the rows of a value are divided into parts: those of the first part, then of the next.

    The number of parts is fixed and their lengths are data, so a graph is the same for all of them.
    A part may be empty. Rows after the last part belong to none.

    :param ends: the row at which each part ends, of shape (parts,)
    :param valid: which rows count, of shape (rows,); None if all do
    """

    ends: torch.Tensor
    valid: torch.Tensor | None = None

    @property
    def _bounds(self) -> torch.Tensor:
        return torch.cat([self.ends.new_zeros(1), self.ends]).to(torch.int64)

    def counts(self) -> torch.Tensor:
        """Count the rows of each part that count, as int64."""
        bounds = self._bounds
        if self.valid is not None:
            before = torch.cumsum(self.valid, 0, dtype=torch.int64)
            bounds = torch.cat([before.new_zeros(1), before])[bounds]
        return torch.diff(bounds)

    def numbers(self, rows: int) -> torch.Tensor:
        """Tell of each row which part it belongs to, as int64; rows of none give the next number.

        :param rows: how many rows there are
        """
        places = torch.arange(rows, device=self.ends.device)
        found = torch.searchsorted(self.ends.to(torch.int64), places, right=True)
        if self.valid is None:
            return found
        return torch.where(self.valid, found, len(self.ends))

    def least(self, values: torch.Tensor) -> torch.Tensor:
        """Find the smallest values of each part; infinity for a part without any.

        :param values: of shape (rows, ...)
        :return: of shape (parts, ...)
        """
        return self._reduced(values, "min", torch.inf)

    def largest(self, values: torch.Tensor) -> torch.Tensor:
        """Find the largest values of each part; minus infinity for a part without any."""
        return self._reduced(values, "max", -torch.inf)

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """Sum the values of each part, row by row, so in the same order every time."""
        return self._reduced(values, "sum", 0.0)

    def _reduced(self, values: torch.Tensor, how: str, nothing: float) -> torch.Tensor:
        if self.valid is not None:
            values = torch.where(beside(self.valid, values), values, nothing)
        # Unsafe means that the bounds are not checked, for which a device would have to be waited.
        return torch.segment_reduce(
            values.contiguous(), how, offsets=self._bounds, axis=0, initial=nothing, unsafe=True
        )


def beside(flags: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """View a flag for each row, or part, so that it goes with all values of it."""
    return flags.reshape(-1, *[1] * (values.ndim - 1))
