"""The batches of a run: this rank's part of the data, and what is known of the whole."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from inlay.data.advice import advice_on_lengths
from inlay.data.batch import count_tokens
from inlay.data.sources import Batches, batches_of
from inlay.engine.run import Run
from inlay.errors import ConfigurationError
from inlay.options import DataOptions, keywords_of
from inlay.ranks.division import Part
from inlay.statistics.data_seen import DataSeen

__all__ = ["describe_data", "read_batches", "require_data", "seen_with"]


def read_batches(model: nn.Module, data: Any, tokenizer: Any, options: DataOptions) -> Batches:
    """Read this process's part of the data for a model; None stands for no data."""
    part = Part.own()
    if data is None:
        return Batches(source="no data", calibration=[], held_out=[], samples=0, part=part)
    batches = batches_of(
        data,
        tokenizer=tokenizer,
        vocabulary=_vocabulary(model),
        part=part,
        **keywords_of(options, DataOptions),
    )
    if not batches.is_divided or not isinstance(batches.calibration, list):
        return batches
    short = advice_on_lengths(model, batches.calibration, options.max_length)
    return batches if short is None else replace(batches, advice=(*batches.advice, short))


def seen_with(run: Run, batch: Any) -> DataSeen:
    """Add a batch to the data that a run has seen."""
    tokens, padding = count_tokens(run.model, batch, count_padding=run.graphs.count_padding)
    seen = run.statistics.data_seen
    return seen.after(samples=_rows(batch), tokens=tokens, padding=padding)


def require_data(seen: DataSeen) -> None:
    """Refuse to go on without any data.

    :param seen: the data of all ranks
    """
    if not seen.batches:
        raise ConfigurationError(
            "the recipe quantizes activations statically, or weighs weights by them, and there is "
            "no data to observe; give data"
        )


def describe_data(run: Run, batches: Batches) -> None:
    """Add to the description of a run's data how it was divided and what is unusual about it."""
    if run.plan.needs_data:
        run.advice = batches.advice
    run.data += _divided(batches, run.statistics.data_parts) + batches.remarks(run.plan.needs_data)


def _divided(batches: Batches, parts: Sequence[DataSeen]) -> str:
    """Say how the data was divided over several processes, if it was."""
    counts = [part.batches for part in parts]
    if len(counts) < 2 or not any(counts):
        return ""
    each = f"{counts[0]:,} each" if len(set(counts)) == 1 else ", ".join(f"{n:,}" for n in counts)
    if len(counts) > 8 and len(set(counts)) > 1:
        each = f"{min(counts):,} to {max(counts):,} each"
    how = "divided over" if batches.is_divided else "and those of all"
    return f", {how} {len(counts)} processes ({each} of {sum(counts):,} batches)"


def _rows(batch: Any) -> int:
    values = batch.values() if isinstance(batch, Mapping) else batch
    first = next((v for v in values if isinstance(v, torch.Tensor) and v.ndim > 0), None)
    return 0 if first is None else int(first.shape[0])


def _vocabulary(model: nn.Module) -> int | None:
    """Return how many token ids the model has embeddings for, or None if it does not say."""
    try:
        embeddings = model.get_input_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError):
        return None
    return getattr(embeddings, "num_embeddings", None)
