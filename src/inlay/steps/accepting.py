"""Problems that finalizing refuses, and accepts if asked to."""

from collections.abc import Collection

from inlay.errors import ConfigurationError
from inlay.options import ACCEPTABLE

__all__ = ["known_words"]


def known_words(accept: Collection[str]) -> frozenset[str]:
    """The problems to accept, after checking that there are such."""
    unknown = sorted(set(accept) - set(ACCEPTABLE))
    if unknown:
        raise ConfigurationError(
            f"cannot accept {', '.join(unknown)}; what can be accepted is "
            + "; ".join(f"{name}: {meaning}" for name, meaning in ACCEPTABLE.items())
        )
    return frozenset(accept)
