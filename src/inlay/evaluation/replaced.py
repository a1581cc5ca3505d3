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

__all__ = ["Replacing"]

# Numbers of the logits of the model itself that are kept for further comparisons: 1 GB in float32.
_KEPT = 1 << 28


class Replacing:
    """Compares a model with what becomes of it when some of its weights are replaced.

    The model stays as it is: the weights are passed to its calls.

    :param views: of all weights that may be replaced, by module
    :param batches: held-out batches
    """

    def __init__(
        self, model: nn.Module, views: Mapping[str, Weight], batches: Sequence[Any]
    ) -> None:
        self._model, self._views = model, views
        self._batches = prepared(model, batches)
        self._plain: dict[int, Any] = {}  # outputs of the model by batch, as many as fit
        self._kept = 0

    @torch.no_grad()
    def compare(
        self, weights: Mapping[str, torch.Tensor], progress: bool | None = None
    ) -> dict[str, Estimate]:
        """Return estimates by name, such as kl and agreement.

        :param weights: those that replace the model's own, by module
        :return: nothing if there are no batches, or the model predicts no probabilities
        """
        model, parameters = self._model, self._parameters(weights)
        outputs = Outputs(model)
        with evaluating(model):
            for place, batch in enumerate(watched(self._batches, "measuring", show=progress)):
                given = dict(named_inputs(model, batch))
                after = torch.func.functional_call(model, parameters, (), given)
                outputs.add(batch, self._before(place), after)
        found = [each for each in outputs.measures if isinstance(each, Choices)]
        return found[0].estimates() if found else {}

    def _before(self, place: int) -> Any:
        """Return the outputs of the model for a batch, and keep them if they are not too many."""
        if place in self._plain:
            return self._plain[place]
        found = run_eagerly(self._model, self._batches[place])
        logits = getattr(found, "logits", None)
        if logits is not None and self._kept + logits.numel() <= _KEPT:
            self._kept += logits.numel()
            self._plain[place] = found
        return found

    def _parameters(self, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the parameters that hold weights, with these in their places."""
        found: dict[str, torch.Tensor] = {}
        for name, weight in weights.items():
            view = self._views[name]
            if view.is_whole:
                found[view.parameter] = weight
                continue
            if view.parameter not in found:
                found[view.parameter] = self._model.get_parameter(view.parameter).detach().clone()
            view.write(weight, found[view.parameter])
        return found
