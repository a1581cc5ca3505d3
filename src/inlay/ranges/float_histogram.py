"""Histograms whose bins are given by the bits of a floating-point number.

A bin is a sign, an exponent and the leading bits of the mantissa. So bins are fixed before any
data is seen, all bins of an octave are equally wide, and histograms can be added.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import torch

from inlay.ranges.row_groups import RowGroups, beside

__all__ = ["FloatBins", "Histogram"]

_MANTISSA = 23  # bits of a float32 after sign and exponent
_OCTAVES = 64  # from 2 ** -32 to 2 ** 32
_SMALLEST = 127 - _OCTAVES // 2  # the exponent of 2 ** -32 as float32 stores it
_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True)
class FloatBins:
    """Bins of float32 by sign, exponent and `mantissa_bits` leading bits of the mantissa.

    Magnitudes below 2 ** -32 share a bin with zero and count as zero. Magnitudes above 2 ** 32
    share the last bin of their sign, as do NaN and Inf. Other dtypes are converted first.
    """

    mantissa_bits: int

    @property
    def per_sign(self) -> int:
        return _OCTAVES << self.mantissa_bits

    @property
    def size(self) -> int:
        return 2 * self.per_sign

    @property
    def _shift(self) -> int:
        return _MANTISSA - self.mantissa_bits

    @property
    def _offset(self) -> int:
        return _SMALLEST << self.mantissa_bits

    def index(self, values: torch.Tensor) -> torch.Tensor:
        """Find the bin of each value: zero first, then by magnitude, then negatives likewise."""
        bits = values.to(torch.float32).view(torch.int32)
        # In place: op by op, new memory for each step takes several times as long as the steps.
        bin_ = bits & 0x7FFFFFFF
        bin_ >>= self._shift
        bin_ -= self._offset
        bin_.clamp_(0, self.per_sign - 1)
        negative = bits >> 31  # the shift copies the sign to all bits
        negative &= self.per_sign
        bin_ += negative
        return bin_

    def count(self, observed: torch.Tensor, row_groups: RowGroups | None = None) -> torch.Tensor:
        """Count the values of each group in each bin.

        :param observed: values of shape (num_observations, *qparam_shape, group_size)
        :param row_groups: those of the observations, each counted apart; None for all together
        :return: int64 of shape (*qparam_shape, size), with a first dimension of row groups if any
        """
        shape = observed.shape[1:-1]
        groups = math.prod(shape)
        index = self.index(observed)
        if groups > 1:  # give each group its own bins, one group after another
            first = torch.arange(groups, dtype=torch.int32, device=index.device) * self.size
            index = index + first.reshape(*shape, 1)
        many = 1
        if row_groups is not None:  # and each row group; observations of none are counted last
            number = row_groups.numbers(len(observed)).to(torch.int32)
            index = index + beside(number * (groups * self.size), index)
            many += len(row_groups.ends)
        counts: torch.Tensor = torch.ops.inlay.count(index.flatten(), many * groups * self.size)
        if row_groups is None:
            return counts.reshape(*shape, self.size)
        return counts.reshape(many, *shape, self.size)[:-1]

    def magnitudes(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return where the bins of one sign begin and end, in float64."""
        place = torch.arange(self.per_sign, dtype=torch.int32, device=device) + self._offset
        inner = (place << self._shift).view(torch.float32).double()
        inner[0] = 0
        outer = inner.roll(-1)
        outer[0], outer[-1] = 0, torch.finfo(torch.float32).max
        return inner, outer

    def in_order(self, device: torch.device) -> torch.Tensor:
        """Return the numbers of all bins by rising value; the two zeros stand side by side."""
        bin_ = torch.arange(self.size, device=device)
        zero, negative_zero = bin_[:1], bin_[self.per_sign : self.per_sign + 1]
        negative, positive = bin_[self.per_sign + 1 :].flip(0), bin_[1 : self.per_sign]
        return torch.cat([negative, zero, negative_zero, positive])


# Used instead of aten.bincount, whose result has a data-dependent shape, and of scatter_add, which
# needs an index of eight bytes and is slower.
@torch.library.custom_op("inlay::count", mutates_args=())
def _count(index: torch.Tensor, size: int) -> torch.Tensor:
    """Count how often each number from 0 to `size` occurs in `index`."""
    return torch.bincount(index, minlength=size)


@_count.register_fake
def _(index: torch.Tensor, size: int) -> torch.Tensor:
    return index.new_empty((size,), dtype=torch.int64)


class Histogram:
    """A distribution read from counts: uniform inside each bin, empty beyond the extremes.

    Each group keeps only the bins that it uses, in the order of their values, followed by empty
    bins up to the number that the fullest group has. So what is read from a group does not depend
    on the groups beside it.

    :param counts: of shape (*qparam_shape, bins.size)
    :param min_vals: the exact smallest values, of shape qparam_shape
    :param max_vals: the exact largest values
    """

    def __init__(
        self,
        bins: FloatBins,
        counts: torch.Tensor,
        min_vals: torch.Tensor,
        max_vals: torch.Tensor,
    ) -> None:
        self.bins, self.counts = bins, counts
        self.min_vals, self.max_vals = min_vals, max_vals

    def cpu(self) -> "Histogram":
        return Histogram(self.bins, self.counts.cpu(), self.min_vals.cpu(), self.max_vals.cpu())

    @cached_property
    def _used(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Inner and outer edges of the bins that each group uses, and their mass."""
        device = self.counts.device
        order = self.bins.in_order(device)
        counts = self.counts.reshape(-1, self.bins.size).index_select(1, order)
        group, place = counts.nonzero(as_tuple=True)
        used = torch.bincount(group, minlength=len(counts))
        rank = torch.arange(len(group), device=device) - (used.cumsum(0) - used)[group]
        shape = (len(counts), int(used.max()))

        def of_each_group(values: torch.Tensor, empty: float) -> torch.Tensor:
            found = torch.full(shape, empty, dtype=torch.float64, device=device)
            found[group, rank] = values.double()
            return found.reshape(*self.counts.shape[:-1], shape[-1])

        inner, outer = (
            torch.cat([edge, -edge])[order][place] for edge in self.bins.magnitudes(device)
        )
        beyond = torch.finfo(torch.float32).max  # empty bins lie after those of all values
        return (
            of_each_group(inner, beyond),
            of_each_group(outer, beyond),
            of_each_group(counts[group, place], 0),
        )

    @property
    def mass(self) -> torch.Tensor:
        return self._used[2]

    @cached_property
    def lower(self) -> torch.Tensor:
        inner, outer, _ = self._used
        return self._inside(torch.minimum(inner, outer))

    @cached_property
    def upper(self) -> torch.Tensor:
        inner, outer, _ = self._used
        return self._inside(torch.maximum(inner, outer))

    @cached_property
    def _below(self) -> torch.Tensor:
        """Mass of all bins before each bin, followed by the total."""
        return torch.nn.functional.pad(self.mass.cumsum(dim=-1), (1, 0))

    @property
    def total(self) -> torch.Tensor:
        return self._below[..., -1]

    def _inside(self, values: torch.Tensor) -> torch.Tensor:
        low, high = (v.double().unsqueeze(-1) for v in (self.min_vals, self.max_vals))
        return torch.clamp(values, low, high)

    def magnitudes(self) -> "Histogram":
        """Return the histogram of the absolute values."""
        positive, negative = self.counts.chunk(2, dim=-1)
        counts = torch.cat([positive + negative, torch.zeros_like(negative)], dim=-1)
        largest = torch.maximum(self.min_vals.abs(), self.max_vals.abs())
        return Histogram(self.bins, counts, torch.zeros_like(largest), largest)

    def without_zeros(self) -> "Histogram":
        counts = self.counts.clone()
        counts[..., 0] = 0
        counts[..., self.bins.per_sign] = 0
        return Histogram(self.bins, counts, self.min_vals, self.max_vals)

    def points(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return values that represent the distribution, and their weights.

        The extremes come first, each a value of its own, since a lone outlier may matter most. All
        values have the dtype of the extremes. In bfloat16 they are the exact numbers that a bin
        holds; in other dtypes they are shifted differently in each bin, so that no grid of
        quantized values falls in step with them.

        :return: values and weights of shape (*qparam_shape, points)
        """
        is_bfloat16 = self.min_vals.dtype == torch.bfloat16
        per_bin = 1 << max(0, (7 if is_bfloat16 else 9) - self.bins.mantissa_bits)
        step = torch.arange(per_bin, device=self.mass.device)
        if not is_bfloat16:
            shift = torch.arange(self.mass.size(-1), device=self.mass.device) * _GOLDEN % 1
            step = step + shift.unsqueeze(-1)
        inner, outer, _ = self._used
        width = (outer - inner).unsqueeze(-1)
        values = (inner.unsqueeze(-1) + width * (step / per_bin)).flatten(-2)
        weights = (self._mass_between() / per_bin).repeat_interleave(per_bin, dim=-1)
        extremes = torch.stack([self.min_vals, self.max_vals], dim=-1)
        return (
            torch.cat([extremes, self._inside(values).to(extremes.dtype)], dim=-1),
            torch.cat([torch.ones_like(extremes, dtype=weights.dtype), weights], dim=-1),
        )

    def _mass_between(self) -> torch.Tensor:
        """Return the mass of each bin without the two extremes, which are known exactly."""
        occupied = (self.mass > 0).long()
        first, last = occupied.argmax(-1), occupied.cumsum(-1).argmax(-1)
        of_extremes = torch.stack([first, last], dim=-1)
        taken = torch.ones_like(of_extremes, dtype=self.mass.dtype)
        return self.mass.scatter_add(-1, of_extremes, -taken).clamp(min=0)

    def mass_below(self, values: torch.Tensor) -> torch.Tensor:
        """Count the values of each group at or below the given ones, of shape (*shape, n)."""
        lower, upper, mass, below = (
            torch.broadcast_to(t, (*values.shape[:-1], t.size(-1))).contiguous()
            for t in (self.lower, self.upper, self.mass, self._below)
        )
        full = torch.searchsorted(upper, values.contiguous(), right=True)
        partial = full.clamp(max=upper.size(-1) - 1)  # the bin that holds the value, if any
        start, end = lower.gather(-1, partial), upper.gather(-1, partial)
        share = ((values - start) / (end - start).clamp(min=1e-300)).clamp(0, 1)
        share = share.masked_fill(full > partial, 0)
        return below.gather(-1, full) + share * mass.gather(-1, partial)

    def quantile(self, fraction: float) -> torch.Tensor:
        """Return the value that `fraction` of the values of each group do not exceed."""
        target = (self.total * fraction).unsqueeze(-1)
        bin_ = torch.searchsorted(self._below[..., 1:].contiguous(), target)
        bin_ = bin_.clamp(max=self.mass.size(-1) - 1)
        share = (target - self._below.gather(-1, bin_)) / self.mass.gather(-1, bin_).clamp(min=1)
        start, end = self.lower.gather(-1, bin_), self.upper.gather(-1, bin_)
        return torch.lerp(start, end, share.clamp(0, 1)).squeeze(-1)
