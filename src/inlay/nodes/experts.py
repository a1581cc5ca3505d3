"""Nodes on values whose rows are divided among the experts of a layer."""

from dataclasses import dataclass

import torch

from inlay.nodes.observe import Observe
from inlay.nodes.quantize import QuantizeDequantize
from inlay.nodes.routing import rows_that_count
from inlay.ranges.parts import Parts
from inlay.statistics.experts import ExpertStatistics
from inlay.statistics.rule import Rule
from inlay.statistics.value import Statistics
from inlay.torch_private import fake_mode_of

__all__ = ["ObserveExperts", "QuantizeExperts", "observe_each_expert"]


@dataclass(frozen=True)
class ObserveExperts(Observe):
    """The callable of a node that observes a value for each expert by itself.

    Its arguments are those of `Observe`, with counts and statistics of all experts along a first
    dimension, and the nodes that say whose rows are whose. Built-in observers measure all experts
    at once, in the graph; others see the rows of one expert after another, outside of it.

    :param experts: how many there are
    :param first: the number of the first one whose rows the value has; it may have those of some
    """

    experts: int = 0
    first: int = 0
    __name__ = "observe_experts"

    @classmethod
    def of_experts(cls, rule: Rule, value: torch.Tensor, experts: int) -> "ObserveExperts":
        """Find the shapes of the statistics with a value without data, or why that cannot be."""
        plain = Observe.traced(rule, value)
        return cls(rule, plain.specs, plain.reason, experts)

    @property
    def in_graph(self) -> bool:
        """Whether the graph itself updates the statistics."""
        return self.reason is None and self.rule.measures_parts

    @torch.no_grad()
    def __call__(  # type: ignore[override]
        self,
        value: torch.Tensor,
        seen: torch.Tensor,
        tokens: torch.Tensor,
        *statistics: torch.Tensor,
        ends: torch.Tensor,
        token_of_row: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
    ) -> None:
        value = value.detach()
        valid = rows_that_count(mask, token_of_row)
        if not self.in_graph:
            observe_each_expert(value, seen, tokens, *statistics, ends, valid, self.first)
            return
        mine = slice(self.first, self.first + len(ends))
        seen, tokens, *known = (of_all[mine] for of_all in (seen, tokens, *statistics))
        parts = Parts(ends, valid)
        before = dict(zip((spec.name for spec in self.specs), known, strict=True))
        after = self.rule.after_parts(before, seen, value, parts)
        for name, tensor in before.items():
            tensor.copy_(after[name])
        counts = parts.counts()
        seen.add_(counts > 0)
        tokens.add_(counts)

    def fake_inputs(self, value: torch.Tensor) -> dict[str, torch.Tensor]:
        mode = fake_mode_of(value)
        assert mode is not None, "a graph is traced with fake tensors"
        of_one = Observe(self.rule, self.specs).fake_inputs(value)
        with mode:
            counts = {
                name: torch.empty(self.experts, dtype=torch.int64, device=value.device)
                for name in ("seen", "tokens")
            }
            if not self.in_graph:
                return {**counts, "handle": torch.empty((), dtype=torch.int64)}
            return counts | {
                name: torch.empty((self.experts, *one.shape), dtype=one.dtype, device=one.device)
                for name, one in of_one.items()
                if name not in counts
            }


@torch.library.custom_op("inlay::observe_each_expert", mutates_args={"seen", "tokens"})
def observe_each_expert(
    value: torch.Tensor,
    seen: torch.Tensor,
    tokens: torch.Tensor,
    handle: torch.Tensor,
    ends: torch.Tensor,
    valid: torch.Tensor | None,
    first: int,
) -> None:
    """Let observers that take in one value at a time see the rows of each expert."""
    of_expert = ExpertStatistics.of_handle(int(handle)).of_expert
    start = 0
    for number, end in enumerate(ends.tolist(), first):
        rows = value[start:end]
        if valid is not None:
            rows = rows[valid[start:end]]
        start = end
        if len(rows):
            _take_in(of_expert[number], rows)
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


@observe_each_expert.register_fake
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


@dataclass(frozen=True, eq=False)
class QuantizeExperts(QuantizeDequantize):
    """The callable of a quantize-dequantize node on rows that are divided among experts.

    It takes the value, the qparams of all experts along a first dimension, and where the rows of
    each expert end.
    """

    __name__ = "quantize_experts"

    @property
    def key(self) -> tuple[str, tuple[str, ...]]:
        args, names = super().key
        return f"for each expert, {args}", names

    def __call__(  # type: ignore[override]
        self, value: torch.Tensor, *qparams: torch.Tensor, ends: torch.Tensor
    ) -> torch.Tensor:
        if not qparams:
            # A row is a token, which compressed-tensors looks for in a second dimension: without
            # one it would give all rows of all experts one scale.
            return self.quantized(value.unsqueeze(0), {}).squeeze(0)
        number = Parts(ends).numbers(len(value)).clamp(max=len(ends) - 1)
        rows = (of_experts[number] for of_experts in qparams)
        return self.quantized(value, dict(zip(self.names, rows, strict=True)))
