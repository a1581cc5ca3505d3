"""Comparing a model with its quantized self, on data that calibration has not seen."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from inlay.calibration import Calibration
from inlay.calibration.phase import Phase
from inlay.calibration.rerun import Rerun
from inlay.calibration.tracing.running import evaluating
from inlay.calibration.tracing.strategies import without_cache
from inlay.data.batch import on_device_of, varying_sizes
from inlay.errors import ConfigurationError
from inlay.evaluation.layer_errors import layer_errors
from inlay.evaluation.measures import Choices, Measure, Vectors, next_tokens
from inlay.progress import watched
from inlay.recipe import Plan
from inlay.report.data import Change, Finding, LayerError

__all__ = [
    "LAYER_BATCHES",
    "Batch",
    "Comparison",
    "Finished",
    "Outputs",
    "Passing",
    "compare",
    "counted_positions",
    "is_causal",
    "named_inputs",
    "prepared",
    "run_eagerly",
    "vocabulary_of",
]

Batch = Mapping[str, Any] | Sequence[Any]

# Layers are compared on so many batches: their error hardly varies, and takes as long again.
LAYER_BATCHES = 4
# Fields of an output that are compared, in this order, if it has no logits.
_VECTORS = ("last_hidden_state", "sentence_embedding", "pooler_output", "image_embeds")


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The difference between a model and its quantized self.

    :param batches: how many batches were compared; without any, layers have the error of weights
        alone
    :param changes: changes of the outputs, the most telling first
    :param layers: errors of layers, in the order of the model
    """

    batches: int
    changes: tuple[Change, ...] = ()
    layers: tuple[LayerError, ...] = ()
    findings: tuple[Finding, ...] = ()


# Batches that have passed the whole model, with the outputs of the plain and the quantized one.
Finished = Iterator[tuple[Batch, Any, Any]]
# Passes batches through both models. Yields the part of the plan that is in memory for each region.
Passing = Callable[[Rerun, Sequence[Batch]], Iterator[tuple[Plan, Finished]]]


@torch.no_grad()
def compare(
    model: nn.Module,
    calibration: Calibration,
    batches: Sequence[Batch],
    passing: Passing | None = None,
) -> Comparison:
    """Compare a model with its finalized graph.

    :param model: the model that was calibrated; it stays as it is
    :param batches: held-out batches: keyword arguments of the model, or tuples of positional ones
    :param passing: runs batches region by region; by default the whole model is one, in memory
    """
    _require_finalized(model, calibration)
    batches = prepared(model, batches)
    outputs, layers = Outputs(model), list[LayerError]()
    with evaluating(model), calibration.graphs.rerun() as rerun:
        passed = (passing or partial(_in_memory, model, calibration))(rerun, batches)
        for plan, finished in passed:
            outputs.add_all(finished)
            layers += layer_errors(rerun.bindings, plan)
    places = calibration.plan.places
    return Comparison(
        batches=len(batches),
        changes=tuple(outputs.changes()),
        layers=tuple(sorted(layers, key=lambda layer: places[layer.module])),
        findings=tuple(outputs.findings()),
    )


def _in_memory(
    model: nn.Module, calibration: Calibration, rerun: Rerun, batches: Sequence[Batch]
) -> Iterator[tuple[Plan, Finished]]:
    """Pass batches through a model that is in memory, as one region."""

    def finished() -> Finished:
        shown = watched(batches, "comparing", show=calibration.show_progress)
        for index, batch in enumerate(shown):
            plain = Phase.COMPARE if index < LAYER_BATCHES else Phase.PLAIN
            yield batch, rerun.outputs(batch, plain), rerun.outputs(batch, Phase.QUANTIZE)

    yield calibration.plan, finished()


def prepared(model: nn.Module, batches: Sequence[Batch]) -> list[Batch]:
    """Return batches as the model takes them: on its device, and told to keep no cache."""
    varying = varying_sizes(batches)
    return [_without_cache(model, on_device_of(model, b, varying)) for b in batches]


def _require_finalized(model: nn.Module, calibration: Calibration) -> None:
    statistics = calibration.statistics
    if not statistics.is_final:
        raise ConfigurationError("finalize the calibration before comparing its result")
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for slot in statistics.plan.weight_slots():
        weight = parameters.get(statistics.plan.weights[slot.module].parameter)
        if statistics.plan.owner(weight) is None:
            raise ConfigurationError(
                f"the weight of {slot.module} is not the one that was calibrated; compare the same "
                "model object that the calibration was made with"
            )


def run_eagerly(model: nn.Module, batch: Batch) -> Any:
    """Run a batch through the model itself."""
    # Parts of the model may be compiled in place with the calibration's backend.
    with torch.compiler.set_stance("force_eager"):
        return model(**batch) if isinstance(batch, Mapping) else model(*batch)


def _without_cache(model: nn.Module, batch: Batch) -> Batch:
    return without_cache(model, batch) if isinstance(batch, Mapping) else batch


def named_inputs(model: nn.Module, batch: Batch) -> Mapping[str, Any]:
    """Return the batch by the names of the model's arguments."""
    if isinstance(batch, Mapping):
        return batch
    return inspect.signature(model.forward).bind_partial(*batch).arguments


def counted_positions(model: nn.Module, batch: Batch) -> torch.Tensor | None:
    """Return a mask of the outputs that are not padding, or None if the batch has none for them.

    A model with an encoder and a decoder returns values of the tokens of its decoder.
    """
    has_decoder = "decoder_input_ids" in inspect.signature(model.forward).parameters
    mask = named_inputs(model, batch).get(
        "decoder_attention_mask" if has_decoder else "attention_mask"
    )
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2:
        return None
    return mask.bool()


def _counted_rows(value: torch.Tensor, counted: torch.Tensor | None) -> slice | torch.Tensor:
    """Return which rows of an output count: all, unless it has a row for each token."""
    if counted is None or value.shape[:-1] != counted.shape:
        return slice(None)
    return counted.flatten()


def _owners(value: torch.Tensor) -> torch.Tensor:
    """Return the row of data that each row of an output belongs to."""
    owners = torch.arange(len(value), device=value.device)
    return owners.repeat_interleave(value.shape[1:-1].numel())


class Outputs:
    """A comparison of the outputs of a model, whatever their form."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._measures: dict[str, Measure] = {}
        self._misfits: list[str] = []

    def add_all(self, finished: Finished) -> None:
        """Add batches one after another: the logits of all may be larger than the model."""
        for batch, before, after in finished:
            self.add(batch, before, after)

    def add(self, batch: Batch, before: Any, after: Any) -> None:
        named = named_inputs(self._model, batch)
        vocabulary = vocabulary_of(self._model)
        name, old = _comparable(before)
        _, new = _comparable(after)
        if old is None or new is None:
            return
        if old.shape != new.shape:
            self._misfits.append(f"{tuple(old.shape)} and {tuple(new.shape)}")
        elif _are_choices(name, old, vocabulary):
            self._add_choices(named, old, new)
        else:
            self._add_vectors(name, counted_positions(self._model, named), old, new)

    def _add_choices(
        self, batch: Mapping[str, Any], before: torch.Tensor, after: torch.Tensor
    ) -> None:
        counted = counted_positions(self._model, batch)
        rows = _counted_rows(before, counted)
        labels = None
        ids = batch.get("input_ids")
        if is_causal(self._model) and ids is not None and ids.shape == before.shape[:-1]:
            labels = next_tokens(ids, counted).flatten()[rows]
        measure = self._measures.setdefault("choices", Choices())
        assert isinstance(measure, Choices)
        owners = _owners(before)[rows]
        measure.add(before.flatten(0, -2)[rows], after.flatten(0, -2)[rows], labels, owners)

    def _add_vectors(
        self,
        name: str,
        counted: torch.Tensor | None,
        before: torch.Tensor,
        after: torch.Tensor,
    ) -> None:
        of = name.replace("_", " ")
        if before.dim() != 3:
            rows = [v.reshape(len(v), -1) for v in (before, after)]
            self._vectors("sequences", f"the {of}").add(*rows)
            return
        kept = _counted_rows(before, counted)
        old, new = (v.flatten(0, 1)[kept] for v in (before, after))
        self._vectors("tokens", f"the {of}").add(old, new, _owners(before)[kept])
        weights = torch.ones(before.shape[:2], device=before.device)
        if counted is not None and counted.shape == weights.shape:
            weights = counted.float()
        means = [_mean(v.float(), weights) for v in (before, after)]
        self._vectors("sequences", f"the mean {of}").add(*means)

    def _vectors(self, unit: str, of: str) -> Vectors:
        measure = self._measures.setdefault(unit, Vectors(unit, of=of))
        assert isinstance(measure, Vectors)
        return measure

    @property
    def measures(self) -> tuple[Measure, ...]:
        return tuple(self._measures.values())

    def changes(self) -> list[Change]:
        return [change for measure in self._measures.values() for change in measure.changes()]

    def findings(self) -> list[Finding]:
        # The first measure is enough: the others use the same numbers.
        found = [r for measure in self.measures[:1] for r in measure.findings()]
        return found + self.misfits()

    def misfits(self) -> list[Finding]:
        """Report outputs of different shapes."""
        if not self._misfits:
            return []
        text = (
            f"The outputs of {len(self._misfits)} batches could not be compared because their "
            f"shapes differ: {self._misfits[0]}."
        )
        return [Finding(severity="warning", text=text)]


def _mean(values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the mean over positions. Positions of weight 0 do not count, even if they are NaN."""
    weights = weights.unsqueeze(-1)
    total = values.masked_fill(weights == 0, 0).sum(1)
    return total / weights.sum(1).clamp(min=1)


def _comparable(output: Any) -> tuple[str, torch.Tensor | None]:
    """Return the most telling tensor of an output, and its name."""
    if isinstance(output, torch.Tensor):
        output = (output,)
    if isinstance(output, (tuple, list)):
        named = [("output", value) for value in output]
    else:
        fields = output if isinstance(output, Mapping) else getattr(output, "__dict__", {})
        first = [name for name in ("logits", *_VECTORS) if name in fields]
        named = [(name, fields[name]) for name in (*first, *fields)]
    # A loss has no dimension, and ids are not floating-point numbers.
    usable = (
        (name, value)
        for name, value in named
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() > 1
    )
    return next(usable, ("output", None))


def _are_choices(name: str, values: torch.Tensor, vocabulary: int | None) -> bool:
    """Return whether the last dimension holds a score for each of several choices."""
    if values.dim() > 3 or values.size(-1) < 2:
        return False
    return name == "logits" or (name == "output" and values.size(-1) == vocabulary)


def vocabulary_of(model: nn.Module) -> int | None:
    config = getattr(model, "config", None)
    # A model of text and images has a config for each.
    text = getattr(config, "get_text_config", lambda: config)()
    size = getattr(text, "vocab_size", None)
    return size if isinstance(size, int) else None


def is_causal(model: nn.Module) -> bool:
    """Return whether the model predicts the next token at each position."""
    can_generate = getattr(model, "can_generate", None)
    config = getattr(model, "config", None)
    is_pair = bool(getattr(config, "is_encoder_decoder", False))
    return callable(can_generate) and bool(can_generate()) and not is_pair
