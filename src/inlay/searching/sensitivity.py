"""How much the predictions of a model depend on each output channel of its layers.

A small error of a layer's output changes the predictions by a KL divergence of half the error
times the Fisher information times the error. Its diagonal is E[g²]: the mean square of the
gradient of the log-probability, with labels sampled from the predictions themselves.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from inlay.calibration.tracing.gradients import TracedModel
from inlay.calibration.tracing.strategies import without_cache
from inlay.data.batch import on_device_of
from inlay.errors import ConfigurationError, GraphError
from inlay.evaluation.compare import counted_positions
from inlay.model import Weight
from inlay.nodes.routing import row_groups
from inlay.progress import watched
from inlay.recipe import Plan
from inlay.torch_private import is_tracing_error, observing_dynamo

__all__ = ["Sensitivity", "sensitivities"]

_SEED = 0
# Logits whose gradient is computed at a time: 64 MB in float32.
_CHUNK = 1 << 24


@dataclass(frozen=True, eq=False)
class Sensitivity:
    """E[g²] of each output channel of a weight.

    :param squares: sums of squared gradients over rows
    :param rows: how many rows had a gradient
    """

    squares: torch.Tensor
    rows: int

    @property
    def mean(self) -> torch.Tensor:
        return self.squares / max(1, self.rows)


def sensitivities(
    model: nn.Module, plan: Plan, batches: Iterable[Any], progress: bool | None = None
) -> dict[str, Sensitivity]:
    """Measure the sensitivity of each weight in the blocks of a model, by module.

    The model runs forward and backward, a block at a time. It stays as it is.

    :raises ConfigurationError: if its blocks cannot be traced, or it predicts nothing
    """
    gathered = _Gathered(plan)
    generator = torch.Generator().manual_seed(_SEED)
    try:
        traced = TracedModel(model, gathered.take)
        with torch.enable_grad(), observing_dynamo():
            for batch in watched(batches, "measuring sensitivity", show=progress):
                own = without_cache(model, on_device_of(model, batch, {}))
                outputs, gradient = _sampled(model, traced.root(**own), own, generator)
                traced.pull(outputs, gradient)
    except Exception as error:
        if not isinstance(error, GraphError) and not is_tracing_error(error):
            raise
        raise ConfigurationError(
            f"the sensitivity of {type(model).__name__} cannot be measured: {error}. Search with "
            "forward_only=True (--forward-only), which needs no gradients"
        ) from error
    return gathered.found


class _Gathered:
    """Sums of squared gradients, by module."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.found: dict[str, Sensitivity] = {}

    def take(
        self,
        weight: torch.Tensor,
        kind: str,
        gradient: torch.Tensor,
        ends: torch.Tensor | None,
    ) -> None:
        owner = self._plan.owner(weight, kind)
        rows = gradient.flatten(0, -2).float()
        if owner in self._plan.weights:
            self._add(self._plan.weights[owner], rows)
        if owner not in self._plan.stacks:
            return  # the recipe leaves it as it is
        by_index = self._plan.stacks[owner].by_index
        for part, views in zip(row_groups(ends, None), by_index, strict=True):
            for view in views:
                self._add(view, view.outputs_of(rows[part]))

    def _add(self, view: Weight, rows: torch.Tensor) -> None:
        # Padding has no gradient, and is no row that counts.
        count = int(rows.any(-1).sum())
        squares = rows.square().sum(0, dtype=torch.float64)
        before = self.found.get(view.module)
        if before is not None:
            squares, count = squares + before.squares, count + before.rows
        self.found[view.module] = Sensitivity(squares, count)


def _sampled(
    model: nn.Module, outputs: Any, batch: Any, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return predictions, and the gradient of the surprise at labels sampled from them.

    Vectors, such as those of an encoder, count as the means of normal distributions.
    """
    counted = counted_positions(model, batch)
    logits = getattr(outputs, "logits", None)
    values = logits if logits is not None else getattr(outputs, "last_hidden_state", None)
    if not isinstance(values, torch.Tensor) or not values.requires_grad:
        raise GraphError("it returns neither logits nor last_hidden_state")
    rows = values.detach().flatten(0, -2)
    if logits is None:
        noise = torch.randn(rows.shape, generator=generator)
        gradient = noise.to(rows)
    else:
        step = max(1, _CHUNK // rows.shape[-1])
        parts = (rows[start : start + step] for start in range(0, len(rows), step))
        gradient = torch.cat([_surprise(part, generator) for part in parts])
    if counted is not None and counted.shape == values.shape[:-1]:
        gradient = gradient.masked_fill(~counted.flatten().unsqueeze(-1), 0)
    return values, gradient.view_as(values)


def _surprise(logits: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return the gradient of the negative log-probability of labels that are sampled."""
    gradient = logits.float().softmax(-1)
    labels = torch.multinomial(gradient.cpu(), 1, generator=generator).to(gradient.device)
    ones = torch.ones_like(labels, dtype=gradient.dtype)
    return gradient.scatter_add(-1, labels, -ones).to(logits.dtype)
