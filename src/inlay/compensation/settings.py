"""Settings of GPTQ, which compensates rounding errors of weights."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from inlay.errors import ConfigurationError

__all__ = ["DEFAULT_DAMPING", "GPTQ"]

# Hessians are those of the unquantized model, and damping also covers the errors that earlier
# layers add to inputs. So it is larger than llm-compressor's 0.01.
DEFAULT_DAMPING = 0.05


@dataclass(frozen=True, kw_only=True)
class GPTQ:
    """How the rounding errors of weights are compensated.

    :param damping: added to the diagonal of each Hessian, relative to its mean; more trusts the
        calibration data less. "auto" chooses it for each layer by the error on held-out tokens
    :param keep_hessians: keep the Hessians with the statistics, so that `requantize` can use them;
        they take as much space as the weights, or more
    """

    damping: float | Literal["auto"] = DEFAULT_DAMPING
    keep_hessians: bool = False

    def __post_init__(self) -> None:
        value: Any = self.damping
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if value != "auto" and (not is_number or not math.isfinite(value) or value <= 0):
            raise ConfigurationError(
                f'gptq: damping must be "auto" or a positive number such as 0.01, not {value!r}'
            )
        if not isinstance(self.keep_hessians, bool):
            raise ConfigurationError(
                f"gptq: keep_hessians must be true or false, not {self.keep_hessians!r}"
            )

    @property
    def chooses_damping(self) -> bool:
        return self.damping == "auto"

    @classmethod
    def of_llmcompressor(cls, dampening_frac: float | None) -> "GPTQ":
        """Read the setting of a GPTQModifier, with its default."""
        return cls(damping=0.01 if dampening_frac is None else dampening_frac)

    @classmethod
    def of(cls, wanted: Any) -> "GPTQ | None":
        """Read what a recipe says: true, false, or a mapping of settings."""
        if wanted is None or wanted is False:
            return None
        if wanted is True:
            return cls()
        if isinstance(wanted, cls):
            return wanted
        known = cls().fields
        if not isinstance(wanted, Mapping):
            raise ConfigurationError(
                f"gptq must be true, false or a mapping of {', '.join(known)}, not {wanted!r}"
            )
        unknown = sorted(set(map(str, wanted)) - set(known))
        if unknown:
            raise ConfigurationError(
                f"gptq has unknown entries: {', '.join(unknown)}; use only {', '.join(known)}"
            )
        return cls(**wanted)

    @property
    def fields(self) -> dict[str, Any]:
        """The settings, as JSON keeps them."""
        return asdict(self)
