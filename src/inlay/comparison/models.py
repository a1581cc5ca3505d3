"""The two models of a comparison, as transformers runs them."""

from collections.abc import Sequence

from torch import nn

from inlay.checkpoint.loading import load_as_stored
from inlay.checkpoint.source import Source
from inlay.errors import ConfigurationError, InlayError
from inlay.evaluation.compare import is_causal
from inlay.report.data import Finding

__all__ = ["load_side", "require_comparable", "require_vocabulary"]

_ADVICE = (
    "transformers has to know its architecture and its quantization: update transformers, pass "
    "trust_remote_code=True (--trust-remote-code) if the folder has code of its own"
)
_SERVED = "or take the predictions of B from a server that runs it (--via vllm URL)"


def load_side(source: Source, letter: str, findings: Sequence[Finding] = ()) -> nn.Module:
    """Load one of the models; its error says what was found in its files before.

    :param letter: A or B
    """
    try:
        return load_as_stored(source)
    except InlayError as error:
        found = [each.text for each in findings if each.severity == "warning"]
        known = f" What is known of it: {' '.join(found)}" if found else ""
        advice = f"{_ADVICE}, {_SERVED}" if letter == "B" else _ADVICE
        raise ConfigurationError(f"{letter} does not load: {error}; {advice}.{known}") from error


def require_vocabulary(a: Source, b: Source) -> None:
    """Refuse models whose predictions have no tokens in common, before loading them."""
    sizes = [_vocabulary_size(side, letter) for side, letter in ((a, "A"), (b, "B"))]
    if None not in sizes and sizes[0] != sizes[1]:
        raise ConfigurationError(
            f"A has a vocabulary of {sizes[0]:,} tokens and B of {sizes[1]:,}: their predictions "
            "cannot be compared. Compare a model with what was made of it; if one of them is "
            "padded, give both the same size with resize_token_embeddings and save it"
        )


def _vocabulary_size(source: Source, letter: str) -> int | None:
    try:
        config = source.config()
    except InlayError as error:
        advice = f"{_ADVICE}, {_SERVED}" if letter == "B" else _ADVICE
        raise ConfigurationError(f"{letter} does not load: {error}; {advice}") from error
    size = getattr(config.get_text_config(), "vocab_size", None)
    return size if isinstance(size, int) else None


def require_comparable(a: nn.Module, b: nn.Module) -> None:
    """Refuse a language model beside a model of another kind."""
    if is_causal(a) != is_causal(b):
        first, second = (type(model).__name__ for model in (a, b))
        raise ConfigurationError(
            f"A is a {first} and B a {second}, and only one of them predicts next tokens; correct "
            "`architectures` in config.json, or compare models of one kind"
        )
