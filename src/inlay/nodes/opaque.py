"""Observers that cannot be traced, as an op in the middle of a compiled graph."""

import torch

from inlay.statistics.value import Statistics

__all__ = ["observe_opaquely"]


@torch.library.custom_op("inlay::observe", mutates_args={"seen", "tokens"})
def observe_opaquely(
    value: torch.Tensor,
    seen: torch.Tensor,
    tokens: torch.Tensor,
    handle: torch.Tensor,
    mask: torch.Tensor | None,
) -> None:
    """Let an observer that keeps its statistics itself see a real value."""
    statistics = Statistics.of_handle(int(handle))
    rule = statistics.rule
    assert statistics.live is not None
    valid = rule.valid(value, mask)
    if valid is None or bool(valid.any()):
        rule.take_in(statistics.live, value, mask)
        seen += 1
        tokens += rule.tokens(value) if valid is None else int(valid.sum())


@observe_opaquely.register_fake
def _(
    value: torch.Tensor,
    seen: torch.Tensor,
    tokens: torch.Tensor,
    handle: torch.Tensor,
    mask: torch.Tensor | None,
) -> None:
    return None
