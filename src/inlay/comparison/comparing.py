"""Comparing two models in folders, or one in a folder with one on a server."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from typing_extensions import Unpack

from inlay.calibration.tracing.running import evaluating
from inlay.checkpoint.loading import Place, find_tokenizer
from inlay.checkpoint.source import Source
from inlay.comparison.configs import config_differences
from inlay.comparison.groups import group_problems
from inlay.comparison.language import LanguageComparison, special_tokens_of
from inlay.comparison.models import load_side, require_comparable, require_vocabulary
from inlay.comparison.predictions import Logits, Prediction
from inlay.comparison.result import ModelComparison
from inlay.comparison.tokenizers import rows_that_differ, tokenizer_differences
from inlay.comparison.weights import stored_differences, weight_differences
from inlay.data.batch import main_tensor
from inlay.data.sources import Batches, batches_of
from inlay.errors import ConfigurationError
from inlay.evaluation.compare import (
    Outputs,
    counted_positions,
    is_causal,
    named_inputs,
    prepared,
    run_eagerly,
    vocabulary_of,
)
from inlay.evaluation.measures import Measure
from inlay.options import (
    CompareKeywords,
    CompareOptions,
    LoadOptions,
    RowOptions,
    keywords_of,
)
from inlay.progress import watched
from inlay.report.data import Finding

__all__ = ["compare"]


@torch.no_grad()
def compare(
    a: Place,
    b: Place,
    data: Any,
    *,
    via: tuple[str, str] | None = None,
    **keywords: Unpack[CompareKeywords],
) -> ModelComparison:
    """Compare two models on data: plain ones, or quantized by Inlay or llm-compressor.

    Both are run by transformers, a batch of rows through A and then through B. The tokenizer of A
    makes tokens of texts and chats. What differs in the files is in `findings`: configs,
    tokenizers, chat templates, groups of the quantization, stored tensors and weights.

    A server gives only the most probable tokens of B. Then agreement, perplexities and the
    probabilities of expected tokens are exact. KL divergences are lower bounds: all other tokens
    count as one.

    :param a: a folder, or a name on the hub whose files are in the local cache
    :param data: a path to `.txt` or `.jsonl`, texts, a dataset or batches; see `inlay.data`
    :param via: ("vllm", URL) takes the predictions of B from a server that has its folder loaded
    :param keywords: the fields of `inlay.options.CompareOptions`
    """
    options = CompareOptions(**keywords)
    sides = [_source(place, options) for place in (a, b)]
    findings = [*config_differences(*sides, served=via is not None), *_stored(*sides)]
    tokenizers = [find_tokenizer(side) for side in sides]
    findings += tokenizer_differences(*tokenizers)
    if via is None:
        require_vocabulary(*sides)
    first = load_side(sides[0], "A")
    batches = _batches(data, first, tokenizers[0], options)
    findings += rows_that_differ(data, batches, tokenizers[1], options)
    if via is not None:
        found, rows = _served(first, sides[1], via, batches, tokenizers[0], options)
    else:
        second = load_side(sides[1], "B", findings)
        require_comparable(first, second)
        if is_causal(first):
            found, rows = _language(first, second, batches, tokenizers[0], options)
        else:
            found, rows = _outputs(first, second, batches, options)
        # A compressed model has its weights since it ran.
        findings += weight_differences(first, second)
    return ModelComparison(
        a=sides[0].place,
        b=sides[1].place,
        via=None if via is None else via[1],
        data=batches.source,
        rows=rows,
        findings=(*_broken(found.pop("measure")), *found.pop("findings", ()), *findings),
        **found,
    )


def _source(place: Place, options: CompareOptions) -> Source:
    loading = {} if isinstance(place, Source) else keywords_of(options, LoadOptions)
    source = Source.of(place, **loading)
    source.require_config()
    return source


def _stored(a: Source, b: Source) -> Iterator[Finding]:
    for letter, side in (("A", a), ("B", b)):
        yield from group_problems(side, letter)
    yield from stored_differences(a, b)


def _batches(data: Any, model: nn.Module, tokenizer: Any, options: CompareOptions) -> Batches:
    return batches_of(
        data,
        tokenizer=tokenizer,
        vocabulary=vocabulary_of(model),
        samples=options.samples,
        held_out=0,
        **keywords_of(options, RowOptions),
    )


def _language(
    a: nn.Module, b: nn.Module, batches: Batches, tokenizer: Any, options: CompareOptions
) -> tuple[dict[str, Any], int]:
    def pairs() -> Iterator[tuple[torch.Tensor, Logits, Prediction]]:
        with evaluating(b):
            for batch, rows in _rows(a, batches, options):
                (own,) = prepared(b, [batch])
                logits = run_eagerly(b, own).logits.to(rows[0][1].device)
                for place, (ids, before, counted) in enumerate(rows):
                    if before.size(-1) != logits.size(-1):
                        raise ConfigurationError(
                            f"A predicts {before.size(-1)} tokens and B {logits.size(-1)}; compare "
                            "models with one vocabulary, or give both the same number of "
                            "embeddings with resize_token_embeddings"
                        )
                    yield ids, Logits(before), Logits(logits[place][counted])

    return _compared(a, pairs(), tokenizer, options)


def _served(
    a: nn.Module,
    b: Source,
    via: tuple[str, str],
    batches: Batches,
    tokenizer: Any,
    options: CompareOptions,
) -> tuple[dict[str, Any], int]:
    from inlay.comparison.served import Server

    if not is_causal(a):
        raise ConfigurationError(
            f"a server predicts next tokens, and {type(a).__name__} does not; compare two folders"
        )
    server = Server.of(via)
    name = server.model_name(b.place, options.served_name)

    def pairs() -> Iterator[tuple[torch.Tensor, Logits, Prediction]]:
        for _, rows in _rows(a, batches, options):
            for ids, before, _ in rows:
                if len(ids) > 1:  # a server gives no prediction behind the last token
                    known = server.predictions(name, ids.tolist(), options.top_logprobs)
                    yield ids, Logits(before[:-1]), known

    return _compared(a, pairs(), tokenizer, options)


def _compared(
    a: nn.Module,
    pairs: Iterable[tuple[torch.Tensor, Logits, Prediction]],
    tokenizer: Any,
    options: CompareOptions,
) -> tuple[dict[str, Any], int]:
    found = LanguageComparison(tokenizer, special_tokens_of(a, tokenizer), options.worst)
    for ids, before, after in pairs:
        found.add(ids, before, after)
    parts = {
        "measure": found.choices,
        "estimates": found.estimates(),
        "positions": found.choices.count,
        "special_tokens": found.special_tokens(),
        "worst": found.worst(),
    }
    return parts, found.rows


def _rows(
    model: nn.Module, batches: Batches, options: CompareOptions
) -> Iterator[tuple[Any, list[tuple[torch.Tensor, torch.Tensor, Any]]]]:
    """Run batches; yield each with the ids, the logits and the valid tokens of its rows."""
    with evaluating(model):
        for batch in watched(batches, "comparing", show=options.progress):
            (own,) = prepared(model, [batch])
            logits = run_eagerly(model, own).logits
            ids: torch.Tensor = named_inputs(model, own)["input_ids"]
            counted = counted_positions(model, own)
            masks = torch.ones_like(ids, dtype=torch.bool) if counted is None else counted
            yield (
                batch,
                [
                    (row[mask], values[mask], mask)
                    for row, values, mask in zip(ids, logits, masks, strict=True)
                ],
            )


def _outputs(
    a: nn.Module, b: nn.Module, batches: Batches, options: CompareOptions
) -> tuple[dict[str, Any], int]:
    """Compare models that predict no next token, such as encoders and classifiers."""
    outputs, rows = Outputs(a), 0
    with evaluating(a), evaluating(b):
        for batch in watched(batches, "comparing", show=options.progress):
            own, other = prepared(a, [batch])[0], prepared(b, [batch])[0]
            outputs.add(own, run_eagerly(a, own), run_eagerly(b, other))
            rows += len(main_tensor(batch))
    estimates = {}
    for measure in outputs.measures:
        for name, estimate in measure.estimates().items():
            is_vector = name in ("cosine", "relative_error")
            estimates[f"{name}_{measure.unit}" if is_vector else name] = estimate
    measures = outputs.measures
    return {
        "measure": measures[0] if measures else None,
        "estimates": estimates,
        "positions": measures[0].count if measures else 0,
        "findings": tuple(outputs.misfits()),
    }, rows


def _broken(measure: Measure | None) -> Iterator[Finding]:
    if measure is None:
        return
    total = measure.count + measure.broken_before + measure.broken_after
    for side, broken in (("A", measure.broken_before), ("B", measure.broken_after)):
        if broken:
            yield Finding(
                severity="warning",
                about=side,
                text=f"The model gives NaN or Inf at {broken:,} of {total:,} {measure.unit}, which "
                "are left out. Check its weights and its dtype.",
            )
