"""Read from the attention masks of a batch which of its tokens are valid."""

from collections.abc import Mapping
from typing import Any

import torch

from inlay.errors import StatisticsError
from inlay.graph import MAIN

__all__ = ["MASK", "has_padding", "sequence_of", "valid_tokens"]

MASK = "attention_mask"
# A mask speaks of the sequence that its prefix names. Without a prefix, it is the main one.
_SEQUENCES = {"decoder_": "decoder", "encoder_": "encoder"}
_VERY_NEGATIVE = -1e4  # added to a score, it leaves no weight


def sequence_of(argument: str) -> str:
    """Return the sequence that an argument of a model belongs to, by its name."""
    return next((of for prefix, of in _SEQUENCES.items() if argument.startswith(prefix)), MAIN)


def valid_tokens(batch: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return a bool tensor (batch, tokens) for each sequence that has an attention mask.

    :param batch: arguments of the model by name
    :raises StatisticsError: if a mask does not tell for certain which tokens are valid
    """
    found = {}
    for name in (MASK, *(f"{prefix}{MASK}" for prefix in _SEQUENCES)):
        mask = batch.get(name)
        if mask is None:
            continue
        valid = _valid(mask)
        if valid is None:
            shape = tuple(mask.shape) if isinstance(mask, torch.Tensor) else type(mask).__name__
            raise StatisticsError(
                f"{name} ({shape}) does not tell for certain which tokens are padding; pass a mask "
                "of shape (batch, tokens) that is 0 at padding, use batch_size=1 without a mask, "
                "or count padding with count_padding=True"
            )
        found[sequence_of(name)] = valid
    return found


def has_padding(valid: Mapping[str, torch.Tensor]) -> bool:
    """Tell whether tokens may be padding. On a device, that is taken to be so without a look."""
    return any(mask.device.type != "cpu" or not bool(mask.all()) for mask in valid.values())


def _valid(mask: Any) -> torch.Tensor | None:
    if not isinstance(mask, torch.Tensor):
        return None
    if mask.ndim == 2:
        if not mask.is_floating_point() or not bool((mask < 0).any()):
            return mask != 0
        return _allowed(mask)
    if mask.ndim in (3, 4):
        return _valid_of_pairs(mask)
    return None


def _allowed(mask: torch.Tensor) -> torch.Tensor | None:
    """Return where an additive or bool mask allows attention; None if it also weighs tokens."""
    if not mask.is_floating_point():
        return mask if mask.dtype == torch.bool else None
    allowed = mask == 0
    return allowed if bool((allowed | (mask <= _VERY_NEGATIVE)).all()) else None


def _valid_of_pairs(mask: torch.Tensor) -> torch.Tensor | None:
    """Return the valid tokens of a mask over pairs of query and key, if only one answer fits.

    The rows have to be those of a causal or of a bidirectional mask without the columns of padding.
    The rows of padding may also see everything, or nothing.
    """
    allowed = _allowed(mask)
    if allowed is None or mask.shape[-1] != mask.shape[-2]:
        return None
    if allowed.ndim == 4:
        if not bool((allowed == allowed[:, :1]).all()):
            return None  # heads differ
        allowed = allowed[:, 0]
    found = [_valid_of_rows(rows) for rows in allowed]
    certain = [valid for valid in found if valid is not None]
    return torch.stack(certain) if len(certain) == len(found) else None


def _valid_of_rows(rows: torch.Tensor) -> torch.Tensor | None:
    """Return which tokens of one sequence are valid, from which key each query may see.

    :return: None if no answer fits, as for several texts in one sequence, or if two do
    """
    full = torch.ones_like(rows)
    answers: list[torch.Tensor] = []
    for valid in (rows.any(0), rows[-1]):
        alike = (
            (rows == (pattern & valid)).all(1) | (~valid & (rows.all(1) | ~rows.any(1)))
            for pattern in (full, full.tril())
        )
        is_known = any(torch.equal(valid, answer) for answer in answers)
        if not is_known and any(bool(rows_fit.all()) for rows_fit in alike):
            answers.append(valid)
    return answers[0] if len(answers) == 1 else None
