"""How large the channels of a value are, from which equalization finds its scales."""

from typing import ClassVar

import torch
from torch import distributed as dist

from inlay.observers.helpers import as_stored
from inlay.observers.kwargs import Kwarg
from inlay.observers.measuring import MeasuringObserver, Tensors
from inlay.ranges.padding import fill_invalid
from inlay.ranges.row_groups import RowGroups

__all__ = ["ChannelRangeObserver"]


class ChannelRangeObserver(MeasuringObserver):
    """The smallest and the largest value of each channel of a module's input, and the sum of sizes.

    It gives no scales and has no name to be chosen by: a recipe with `equalize` asks for it.
    """

    any_format = True
    observes_input = True
    _act_sync_dict = {
        "min_vals": dist.ReduceOp.MIN,
        "max_vals": dist.ReduceOp.MAX,
        "magnitudes": dist.ReduceOp.SUM,
    }
    _kwargs: ClassVar[tuple[Kwarg, ...]] = ()

    def measure(self, observed: torch.Tensor, valid: torch.Tensor | None = None) -> Tensors:
        raise NotImplementedError("ranges of channels are those of a module's input")

    def measure_input(self, x: torch.Tensor, valid: torch.Tensor | None = None) -> Tensors:
        rows = x.reshape(-1, x.size(-1))
        sizes = rows.abs().to(torch.float32)
        if valid is not None:
            rows, sizes = fill_invalid(rows, valid), torch.where(valid.unsqueeze(-1), sizes, 0)
        low, high = torch.amin(rows, 0), torch.amax(rows, 0)
        ranges = {"min_vals": as_stored(low), "max_vals": as_stored(high)}
        return {**ranges, "magnitudes": sizes.sum(0)}

    def measure_input_row_groups(self, x: torch.Tensor, groups: RowGroups) -> Tensors:
        ranges = {"min_vals": as_stored(groups.least(x)), "max_vals": as_stored(groups.largest(x))}
        return {**ranges, "magnitudes": groups.total(x.abs().to(torch.float32))}
