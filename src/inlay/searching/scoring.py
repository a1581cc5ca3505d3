"""Score all formats of all layers of a model, and measure choices among them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from inlay.calibration import Calibration
from inlay.checkpoint.loading import require_full_precision
from inlay.checkpoint.writing import size_of_model
from inlay.compensation.settings import DEFAULT_DAMPING, GPTQ
from inlay.data.batch import count_tokens
from inlay.data.sources import Batches
from inlay.engine.batches import read_batches
from inlay.engine.hessian_room import require_room_for_hessians
from inlay.engine.in_memory import InMemory
from inlay.engine.keeping import Keeper
from inlay.errors import ConfigurationError
from inlay.evaluation.replaced import Replacing
from inlay.fingerprints import fingerprints, weights_in
from inlay.model import Weight
from inlay.options import Options
from inlay.recipe import Recipe
from inlay.run_record import model_name
from inlay.searching.costs import FormatCosts, costs_of_format, plain_costs
from inlay.searching.formats import Format
from inlay.searching.scores import Check, Scores, UnitScore
from inlay.searching.sensitivity import Sensitivity, sensitivities
from inlay.searching.solving import Choice
from inlay.searching.units import Unit, find_units

__all__ = ["Scoring"]

# Tokens that sensitivity is measured on: its mean over them hardly changes with more.
_TOKENS = 1 << 15


class Scoring:
    """The scores of a model, with the quantized weights that they are of.

    :param gptq: how rounding errors are compensated in all layers
    :param ignore: layers that stay as they are, besides the head
    :param settings: what scores depend on besides model and data, in words
    :ivar by_format: the costs of all formats by layer, with the weights in them
    """

    def __init__(
        self,
        model: nn.Module,
        data: Any,
        tokenizer: Any,
        *,
        formats: Sequence[Format],
        gptq: GPTQ | None,
        ignore: Sequence[str],
        forward_only: bool,
        settings: Mapping[str, str],
        options: Options,
    ) -> None:
        require_full_precision(getattr(model, "config", None), model_name(model))
        self.model, self._formats, self._gptq = model, formats, gptq
        self._options = options
        batches = read_batches(model, data, tokenizer, options)
        observed = _observed(model, batches, ignore, options, holds_out=gptq is not None)
        self._views: Mapping[str, Weight] = observed.plan.weights
        self._replacing = Replacing(model, self._views, batches.held_out)
        known = None
        if not forward_only:
            some = _first_batches(model, batches)
            known = sensitivities(model, observed.plan, some, options.progress)
        left: dict[str, str] = {}
        units = dict(self._units(observed, known, left))
        self.by_format = [
            self._costs(observed, [unit for unit in units if place in units[unit]], place, known)
            for place in range(len(formats))
        ]
        plain = plain_costs(observed, units)
        self.scores = Scores(
            model=model_name(model),
            data=batches.source,
            tokens=observed.statistics.data_seen.tokens,
            formats=tuple(each.name for each in formats),
            forward_only=forward_only,
            kept=size_of_model(model) - sum(plain.sizes.values()),
            units=tuple(self._scored(observed, unit, places) for unit, places in units.items()),
            left=left,
            weights=fingerprints(weights_in(model)),
            settings=dict(settings),
        )

    def measure(self, choice: Choice) -> float | None:
        """Measure the KL divergence of a choice, unless it is known, and add it to the scores.

        :return: None if there are no held-out rows, or the model predicts no probabilities
        """
        known = self.scores.check_of(choice)
        if known is not None:
            return known.kl.value
        weights: dict[str, torch.Tensor] = {}
        for number, unit in enumerate(self.scores.units):
            found = self.by_format[self.scores.format_of(number, choice)].weights
            weights |= {name: found[name] for name in unit.layers if name in found}
        estimates = self._replacing.compare(weights, self._options.progress)
        if "kl" not in estimates:
            return None
        check = Check(
            choice=choice,
            predicted=self.scores.predicted(choice),
            kl=estimates["kl"],
            perplexity_ratio=estimates.get("perplexity_ratio"),
            agreement=estimates["agreement"],
        )
        self.scores = self.scores.with_check(check)
        return check.kl.value

    def _units(
        self,
        observed: Calibration,
        known: Mapping[str, Sensitivity] | None,
        left: dict[str, str],
    ) -> list[tuple[Unit, list[int]]]:
        """Return the units that are searched, with the places of the formats that fit each.

        :param left: takes the layers of others, with the reason
        """
        found: list[tuple[Unit, list[int]]] = []
        for unit in find_units(observed):
            places = self._fitting(unit)
            if known is not None and not any(name in known for name in unit.layers):
                reason = "it is outside the blocks, where its sensitivity is not measured"
            elif not places:
                reason = f"none of the formats fits {unit.layers[0]}"
            else:
                found.append((unit, places))
                continue
            left |= dict.fromkeys(unit.layers, reason)
        if not found:
            reasons = "; ".join(dict.fromkeys(left.values()))
            raise ConfigurationError(f"there is no layer to choose a format for: {reasons}")
        return found

    def _fitting(self, unit: Unit) -> list[int]:
        """Return the places of the formats that all layers of a unit can have.

        Experts do not stay as they are: transformers expects them all quantized in a checkpoint
        where any layer is.
        """
        columns = {self._views[name].shape[1] for name in unit.layers}
        return [
            place
            for place, each in enumerate(self._formats)
            if all(map(each.fits, columns)) and not (each.is_plain and unit.is_stack)
        ]

    def _costs(
        self,
        observed: Calibration,
        units: Sequence[Unit],
        place: int,
        known: Mapping[str, Sensitivity] | None,
    ) -> FormatCosts:
        if self._formats[place].is_plain or not units:
            return plain_costs(observed, units)
        return costs_of_format(
            observed,
            units,
            self._formats[place],
            gptq=self._gptq,
            sensitivity=known,
            progress=self._options.progress,
        )

    def _scored(self, observed: Calibration, unit: Unit, places: Sequence[int]) -> UnitScore:
        views = [self._views[name] for name in unit.layers]
        itemsize = observed.graphs.weights.original(views[0]).element_size()
        costs = [self.by_format[place] for place in places]
        return UnitScore(
            layers=unit.layers,
            targets=unit.targets,
            weights=sum(view.numel for view in views),
            places=tuple(places),
            bits=tuple(self._formats[place].bits(itemsize) for place in places),
            sizes=tuple(sum(each.sizes[name] for name in unit.layers) for each in costs),
            costs=tuple(sum(each.costs[name] for name in unit.layers) for each in costs),
        )


def _observed(
    model: nn.Module,
    batches: Batches,
    ignore: Sequence[str],
    options: Options,
    *,
    holds_out: bool,
) -> Calibration:
    """Run the data through a calibration that gathers XᵀX and the importance of inputs.

    Both serve every format, so the format of this calibration is of no consequence.
    """
    recipe = Recipe.from_preset(
        "W8A16",
        weights={"strategy": "channel", "observer": "imatrix_mse"},
        # A damping that is chosen also gathers Hessians of held-out tokens.
        gptq={"keep_hessians": True, "damping": "auto" if holds_out else DEFAULT_DAMPING},
        ignore=ignore,
    )
    recipe = replace(recipe, keeps_head=True).for_model(model)
    keeper = Keeper(None, model_name(model), recipe, batches)
    run = keeper.begin(
        model,
        recipe,
        False,
        data=batches.source,
        compiler=options.compiler,
        count_padding=options.count_padding,
        progress=options.progress,
    )
    engine = InMemory(run, batches, keeper, accept=options.accept)
    try:
        require_room_for_hessians(run.plan, model)
    except ConfigurationError as error:
        raise ConfigurationError(
            "a search gathers the Hessians of all layers in memory, where they do not fit. Leave "
            "some layers out (ignore, --ignore), or use a machine with more memory"
        ) from error
    for region in engine.regions:
        engine.observe(region)
    return run


def _first_batches(model: nn.Module, batches: Batches) -> list[Any]:
    """Return the first batches, as many as sensitivity needs."""
    found: list[Any] = []
    tokens = 0
    for batch in batches:
        if tokens >= _TOKENS:
            break
        found.append(batch)
        tokens += count_tokens(model, batch, count_padding=False)[0]
    return found
