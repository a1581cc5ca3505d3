"""Nodes that observe: their callables, which take the statistics of a slot as arguments."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from inlay.nodes.opaque import observe_opaquely
from inlay.nodes.routing import valid_rows
from inlay.nodes.row_groups import observe_all_groups, observe_each_group
from inlay.ranges.candidates import is_traced
from inlay.ranges.row_groups import RowGroups
from inlay.statistics.rule import Rule, TensorSpec
from inlay.torch_private import fake_mode_of

__all__ = ["Observe", "ObserveWeight"]


@dataclass(frozen=True)
class Observe:
    """The callable of an observe node: updates the statistics it is given from a value.

    Its arguments are the value, how many values and how many tokens were seen before, the
    statistics in the order of `specs`, and the mask of a batch with padding. If the rows of the
    value stand in groups, counts and statistics have a first dimension of groups, and more
    arguments tell where the rows of each group end and which token each row is of.

    :param specs: shapes of the statistics, of one group
    :param reason: why the observer cannot be traced and keeps its statistics itself, if so
    :param groups: how many row groups have statistics of their own; None for the value as a whole
    :param first: the number of the first group whose rows the value has; it may have those of some
    """

    rule: Rule
    specs: tuple[TensorSpec, ...] = ()
    reason: str | None = None
    groups: int | None = None
    first: int = 0
    __name__ = "observe"

    @classmethod
    def traced(cls, rule: Rule, value: torch.Tensor, groups: int | None = None) -> "Observe":
        """Find the shapes of the statistics with a value without data, or why that cannot be."""
        try:
            return cls(rule, rule.specs(value), groups=groups)
        except Exception as error:
            # A user's own observer may fail in any way while it is traced, and works untraced.
            reason = f"{type(error).__name__}: {error}".split("\n")[0]
            return cls(rule, (), reason, groups)

    @torch.no_grad()
    def __call__(
        self,
        value: torch.Tensor,
        seen: torch.Tensor,
        tokens: torch.Tensor,
        *statistics: torch.Tensor,
        mask: torch.Tensor | None = None,
        ends: torch.Tensor | None = None,
        token_of_row: torch.Tensor | None = None,
    ) -> None:
        value = value.detach()
        if ends is not None:
            valid = valid_rows(mask, token_of_row)
            self._observe_groups(value, seen, tokens, statistics, RowGroups(ends, valid))
            return
        if isinstance(value.numel(), int) and value.numel() == 0:
            return
        if self.reason is not None:
            observe_opaquely(value, seen, tokens, *statistics, mask)
            return
        before = dict(zip((spec.name for spec in self.specs), statistics, strict=True))
        if value.device.type == "cpu" and not is_traced(value):
            self._take_in(before, seen, tokens, value, mask)
            return
        valid = self.rule.valid(value, mask)
        after = self.rule.after(before, seen, value, valid)
        for name, tensor in before.items():
            tensor.copy_(after[name])
        seen.add_(1 if valid is None else valid.any().to(seen.dtype))
        tokens.add_(self.rule.tokens(value) if valid is None else valid.sum())

    def _observe_groups(
        self,
        value: torch.Tensor,
        seen: torch.Tensor,
        tokens: torch.Tensor,
        statistics: Sequence[torch.Tensor],
        groups: RowGroups,
    ) -> None:
        if not self.in_graph:
            ends, valid = groups.ends, groups.valid
            observe_each_group(value, seen, tokens, *statistics, ends, valid, self.first)
            return
        own = slice(self.first, self.first + len(groups.ends))
        names = (spec.name for spec in self.specs)
        before = {name: of_all[own] for name, of_all in zip(names, statistics, strict=True)}
        observe_all_groups(self.rule, before, seen[own], tokens[own], value, groups)

    def _take_in(
        self,
        before: dict[str, torch.Tensor],
        seen: torch.Tensor,
        tokens: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> None:
        """The same for a value at hand: what is known of it need not be computed both ways."""
        if mask is not None and bool(mask.all()):
            mask = None  # there is no padding
        valid = self.rule.valid(value, mask)
        if valid is not None and not bool(valid.any()):
            return
        is_first = int(seen) == 0
        rule = self.rule
        after = rule.first(before, value, valid) if is_first else rule.later(before, value, valid)
        for name, tensor in before.items():
            tensor.copy_(after[name])
        seen.add_(1)
        tokens.add_(rule.tokens(value) if valid is None else valid.sum())

    @property
    def is_opaque(self) -> bool:
        return self.reason is not None

    @property
    def in_graph(self) -> bool:
        """Whether the graph itself updates the statistics."""
        return self.reason is None and (self.groups is None or self.rule.measures_row_groups)

    def fake_inputs(self, value: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the arguments after the value, by name and without data."""
        mode = fake_mode_of(value)
        assert mode is not None, "a graph is traced with fake tensors"
        first = () if self.groups is None else (self.groups,)
        with mode:
            counts = {
                name: torch.empty(first, dtype=torch.int64, device=value.device)
                for name in ("seen", "tokens")
            }
            if not self.in_graph:
                return {**counts, "handle": torch.empty((), dtype=torch.int64)}
            statistics = {
                spec.name: torch.empty((*first, *spec.shape), dtype=spec.dtype, device=spec.device)
                for spec in self.specs
            }
        return {**counts, **statistics}


@dataclass(frozen=True)
class ObserveWeight:
    """The callable of a weight's observe node. It does nothing while batches run."""

    rule: Rule
    __name__ = "observe_weight"

    def __call__(self, weight: torch.Tensor) -> None:
        return None
