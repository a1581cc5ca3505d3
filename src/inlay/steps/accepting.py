"""Problems that finalizing refuses, and accepts if asked to."""

from collections.abc import Collection

from inlay.errors import ConfigurationError
from inlay.statistics.on_disk import OTHER_WEIGHTS

__all__ = ["ACCEPTABLE", "known_words"]

ACCEPTABLE = {
    "unobserved": "slots that saw no data stay in full precision",
    "not_finite": "slots with NaN or Inf in their statistics stay in full precision",
    "few_tokens": "experts that saw few tokens are quantized by these",
    "unfused": "layers that are served as one keep global scales of their own",
    OTHER_WEIGHTS: "stored statistics of a model with other weights are used",
    "mistraced": "the traced model is calibrated although it differs from the eager one",
}


def known_words(accept: Collection[str]) -> frozenset[str]:
    """The problems to accept, after checking that there are such."""
    unknown = sorted(set(accept) - set(ACCEPTABLE))
    if unknown:
        raise ConfigurationError(
            f"cannot accept {', '.join(unknown)}; what can be accepted is "
            + "; ".join(f"{name}: {meaning}" for name, meaning in ACCEPTABLE.items())
        )
    return frozenset(accept)
