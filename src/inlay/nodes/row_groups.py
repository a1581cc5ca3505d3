"""Observe a value whose rows stand in groups, each with statistics of its own."""

import torch

from inlay.ranges.row_groups import RowGroups
from inlay.statistics.row_groups import GroupedStatistics
from inlay.statistics.rule import Rule
from inlay.statistics.value import Statistics

__all__ = ["observe_all_groups", "observe_each_group"]


def observe_all_groups(
    rule: Rule,
    before: dict[str, torch.Tensor],
    seen: torch.Tensor,
    tokens: torch.Tensor,
    value: torch.Tensor,
    groups: RowGroups,
) -> None:
    """Update the statistics of all row groups at once.

    :param before: statistics with a first dimension of groups
    """
    after = rule.after_row_groups(before, seen, value, groups)
    for name, tensor in before.items():
        tensor.copy_(after[name])
    counts = groups.counts()
    seen.add_(counts > 0)
    tokens.add_(counts)


@torch.library.custom_op("inlay::observe_each_group", mutates_args={"seen", "tokens"})
def observe_each_group(
    value: torch.Tensor,
    seen: torch.Tensor,
    tokens: torch.Tensor,
    handle: torch.Tensor,
    ends: torch.Tensor,
    valid: torch.Tensor | None,
    first: int,
) -> None:
    """Let observers that take in one value at a time see one row group after another.

    :param first: the number of the first group whose rows the value has
    """
    of_group = GroupedStatistics.of_handle(int(handle)).of_group
    start = 0
    for number, end in enumerate(ends.tolist(), first):
        rows = value[start:end]
        if valid is not None:
            rows = rows[valid[start:end]]
        start = end
        if len(rows):
            _take_in(of_group[number], rows)
            # A compiled graph may hand over a copy of the counts, to be copied back.
            seen[number] += 1
            tokens[number] += len(rows)


def _take_in(statistics: Statistics, rows: torch.Tensor) -> None:
    rule = statistics.rule
    if statistics.live is not None:
        rule.take_in(statistics.live, rows, None)
    else:
        before = dict(statistics.tensors)
        take_in = rule.first if statistics.is_empty else rule.later
        for name, after in take_in(before, rows).items():
            before[name].copy_(after)


@observe_each_group.register_fake
def _(
    value: torch.Tensor,
    seen: torch.Tensor,
    tokens: torch.Tensor,
    handle: torch.Tensor,
    ends: torch.Tensor,
    valid: torch.Tensor | None,
    first: int,
) -> None:
    return None
