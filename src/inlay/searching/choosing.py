"""Search for the formats of a model's layers that meet a target."""

from collections.abc import Iterable
from typing import Any

from torch import nn
from typing_extensions import Unpack

from inlay.collectives import have_ranks
from inlay.errors import ConfigurationError
from inlay.fingerprints import difference, fingerprints, weights_in
from inlay.options import SearchKeywords, SearchOptions
from inlay.searching.formats import parse_formats
from inlay.searching.found import Found
from inlay.searching.recipes import mixed_recipe
from inlay.searching.scores import Scores
from inlay.searching.scoring import Scoring
from inlay.searching.solving import Choice
from inlay.searching.targets import Target, choose, points_of, smallest_within

__all__ = ["search"]

# Choices that a search for a KL divergence measures at most.
_CHECKS = 8


def search(
    model: nn.Module,
    data: Any = None,
    *,
    scores: Scores | None = None,
    ignore: Iterable[str] = (),
    tokenizer: Any = None,
    **keywords: Unpack[SearchKeywords],
) -> Found:
    """Choose a format for each layer, so that the model meets a target with the least loss.

    The model runs on the data forward and backward. From XᵀX of the inputs and E[g²] of the outputs
    of each layer, the loss by every format follows without running it again. Held-out rows then
    measure what the choice loses. Memory holds the weights in each format beside the model.

    :param data: rows to score on, as `inlay.calibrate` takes them; not read if `scores` are given
    :param scores: those of an earlier search, with which another target takes seconds. Nothing is
        measured then
    :param ignore: layers that stay as they are, besides the head; see `Recipe.from_preset`
    :param keywords: the fields of `inlay.options.SearchOptions`; `bits`, `size` or `max_kl` is the
        target
    """
    options = SearchOptions(**keywords)
    target = Target.of(options)
    known, gptq = parse_formats(options.formats, options.method)
    ignored = list(ignore)
    settings = {
        "formats": ", ".join(each.name for each in known),
        "method": options.method,
        "ignore": ", ".join(ignored) or "the head alone",
        "forward_only": str(options.forward_only),
    }
    if scores is not None:
        _require_same(scores, model, settings)
        choice = _by_scores(scores, target)
    elif have_ranks():
        raise ConfigurationError("a search runs in one process; start it without torchrun")
    else:
        scoring = Scoring(
            model,
            data,
            tokenizer,
            formats=known,
            gptq=gptq,
            ignore=ignored,
            forward_only=options.forward_only,
            settings=settings,
            options=options,
        )
        if target.kind == "max_kl":
            choice = _within(scoring, target.value)
        else:
            choice = choose(scoring.scores, target)
        scoring.measure(choice)
        scores = scoring.scores
    recipe = mixed_recipe(scores, choice, known, gptq)
    return Found(recipe=recipe, scores=scores, choice=choice, target=target)


def _require_same(scores: Scores, model: nn.Module, settings: dict[str, str]) -> None:
    unlike = difference(scores.weights, fingerprints(weights_in(model)))
    if unlike is not None:
        raise ConfigurationError(
            f"the scores are of a model with other weights: {unlike} differ. Search without them"
        )
    for name, value in settings.items():
        if scores.settings.get(name) != value:
            raise ConfigurationError(
                f"the scores are for {name} {scores.settings.get(name)}, not {value}. Search "
                "without them, or with the same"
            )


def _by_scores(scores: Scores, target: Target) -> Choice:
    """Choose by stored scores alone."""
    if target.kind != "max_kl":
        return choose(scores, target)
    if scores.forward_only and not scores.checks:
        raise ConfigurationError(
            "these scores are relative errors, which predict no KL divergence. Search without them"
        )
    points = points_of(scores)
    return points[smallest_within(scores, points, target.value)]


def _within(scoring: Scoring, max_kl: float) -> Choice:
    """Find the smallest choice on the frontier whose measured KL divergence is within a limit.

    Measured choices correct the predictions, and these name the next choice to measure. It lies
    between the largest choice known to be beyond the limit, and the smallest known to be within it.
    Halving this range follows if predictions do not end it.
    """
    points = points_of(scoring.scores)
    # The largest choice counts as within the limit until it is measured.
    beyond, within = -1, len(points) - 1
    for number in range(_CHECKS):
        if within - beyond <= 1:
            break
        place = (beyond + within) // 2
        if number < _CHECKS // 2:
            guess = smallest_within(scoring.scores, points, max_kl)
            place = min(max(guess, beyond + 1), within - 1)
        if _measured(scoring, points[place]) <= max_kl:
            within = place
        else:
            beyond = place
    kl = _measured(scoring, points[within])
    if kl > max_kl:
        raise ConfigurationError(
            f"the largest formats have a KL divergence of {kl:.3g}, above max_kl={max_kl:g}. Add "
            "a format of more bits, such as bf16 (--formats)"
        )
    return points[within]


def _measured(scoring: Scoring, choice: Choice) -> float:
    kl = scoring.measure(choice)
    if kl is None:
        raise ConfigurationError(
            "max_kl is a KL divergence on held-out rows: it needs such rows (held_out, or "
            "--held-out) and a model that predicts probabilities. Search for bits or size instead"
        )
    return kl
