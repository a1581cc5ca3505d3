"""Compare a model with itself after some of its weights are replaced, on held-out rows."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from inlay.calibration.tracing.running import evaluating
from inlay.evaluation.compare import Outputs, named_inputs, prepared, run_eagerly
from inlay.evaluation.measures import Choices
from inlay.model import Weight
from inlay.progress import watched
from inlay.report.data import Estimate

__all__ = ["compare_replaced"]


@torch.no_grad()
def compare_replaced(
    model: nn.Module,
    views: Mapping[str, Weight],
    weights: Mapping[str, torch.Tensor],
    batches: Sequence[Any],
    progress: bool | None = None,
) -> dict[str, Estimate]:
    """Compare a model with itself after some of its weights are replaced.

    The model stays as it is: the weights are passed to its calls.

    :param views: of the weights, by module
    :param weights: those that replace the model's own, by module
    :return: estimates by name, such as kl and agreement; none if the model predicts no
        probabilities
    """
    parameters: dict[str, torch.Tensor] = {}
    for name, weight in weights.items():
        view = views[name]
        if view.is_whole:
            parameters[view.parameter] = weight
            continue
        if view.parameter not in parameters:
            parameters[view.parameter] = model.get_parameter(view.parameter).detach().clone()
        view.write(weight, parameters[view.parameter])
    outputs = Outputs(model)
    with evaluating(model):
        for batch in watched(prepared(model, batches), "measuring", show=progress):
            before = run_eagerly(model, batch)
            after = torch.func.functional_call(
                model, parameters, (), dict(named_inputs(model, batch))
            )
            outputs.add(batch, before, after)
    found = [each for each in outputs.measures if isinstance(each, Choices)]
    return found[0].estimates() if found else {}
