"""Reduce the rows of a value group by group, where the rows of a group are adjacent."""

from dataclasses import dataclass

import torch

__all__ = ["RowGroups", "beside"]


@dataclass(frozen=True)
class RowGroups:
    """How the rows of a value are divided into groups: first those of the first, and so on.

    The number of groups is fixed and their lengths are data, so one graph serves all lengths. A
    group may be empty. Rows after the last group belong to none.

    :param ends: the row at which each group ends, of shape (groups,)
    :param valid: which rows count, of shape (rows,); None if all do
    """

    ends: torch.Tensor
    valid: torch.Tensor | None = None

    @property
    def _bounds(self) -> torch.Tensor:
        return torch.cat([self.ends.new_zeros(1), self.ends]).to(torch.int64)

    def counts(self) -> torch.Tensor:
        """Count the valid rows of each group, as int64."""
        bounds = self._bounds
        if self.valid is not None:
            before = torch.cumsum(self.valid, 0, dtype=torch.int64)
            bounds = torch.cat([before.new_zeros(1), before])[bounds]
        return torch.diff(bounds)

    def numbers(self, rows: int) -> torch.Tensor:
        """Return the number of each row's group, as int64; rows of none give the next number.

        :param rows: how many rows there are
        """
        places = torch.arange(rows, device=self.ends.device)
        found = torch.searchsorted(self.ends.to(torch.int64), places, right=True)
        if self.valid is None:
            return found
        return torch.where(self.valid, found, len(self.ends))

    def least(self, values: torch.Tensor) -> torch.Tensor:
        """Find the smallest values of each group; infinity for a group without any.

        :param values: of shape (rows, ...)
        :return: of shape (groups, ...)
        """
        return self._reduced(values, "min", torch.inf)

    def largest(self, values: torch.Tensor) -> torch.Tensor:
        """Find the largest values of each group; minus infinity for a group without any."""
        return self._reduced(values, "max", -torch.inf)

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """Sum the values of each group, row by row, in the same order every time."""
        return self._reduced(values, "sum", 0.0)

    def _reduced(self, values: torch.Tensor, how: str, nothing: float) -> torch.Tensor:
        if self.valid is not None:
            values = torch.where(beside(self.valid, values), values, nothing)
        # Unsafe skips the bounds check, which would synchronize the device.
        return torch.segment_reduce(
            values.contiguous(), how, offsets=self._bounds, axis=0, initial=nothing, unsafe=True
        )


def beside(flags: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """View a flag for each row, or group, so that it broadcasts over the values of it."""
    return flags.reshape(-1, *[1] * (values.ndim - 1))
