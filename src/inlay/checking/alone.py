"""Sequences of padded batches one by one, and what a model computes for them."""

import inspect
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

__all__ = ["ComputedOtherwiseError", "RowsAlone", "named", "sequences_of", "valid_of"]

_MASK = "attention_mask"
_DECODER = "decoder_"
_IDS = f"{_DECODER}input_ids"
_CLOSE = 1e-3  # of the largest value: a model rounds otherwise in batches of another size


class ComputedOtherwiseError(Exception):
    """A model computes for a sequence alone what it does not compute for it beside padding."""


class RowsAlone:
    """The values of slots for the sequences of a batch, each run alone.

    They show which rows of the padded batch are valid: those that are computed for the sequences
    alone. Neither masks nor sizes have a say.
    """

    def __init__(self) -> None:
        self._rows: defaultdict[tuple[str, int], list[torch.Tensor]] = defaultdict(list)
        self._calls: Counter[str] = Counter()

    def begin(self) -> None:
        """Count the calls of modules from the first again, as another batch runs."""
        self._calls.clear()

    def add(self, name: str, value: torch.Tensor) -> None:
        """Keep the rows of a sequence."""
        self._rows[self._key(name)].append(value.detach().flatten(0, -2).clone())

    def kept(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Return the rows of a batch that are computed for its sequences alone.

        :raises ComputedOtherwiseError: if a row of a sequence is not among those of the batch
        """
        parts = self._rows.get(self._key(name), [])
        rows = value.detach().flatten(0, -2)
        alone = torch.cat(parts) if parts else rows[:0]
        is_table = len(alone) > len(rows)  # it has no batch: each sequence computes it anew
        found, wanted = (alone, rows) if is_table else (rows, alone)
        far = torch.cdist(wanted.double(), found.double(), p=float("inf"))
        limit = _CLOSE * (float(value.abs().max()) or 1.0)
        places = []
        for distances in far:
            place = int(distances.argmin())
            if not bool(distances[place] <= limit):
                raise ComputedOtherwiseError(name)
            far[:, place] = float("inf")  # a row is that of one token
            places.append(place)
        return value if is_table else rows[sorted(places)]

    def _key(self, name: str) -> tuple[str, int]:
        self._calls[name] += 1
        return name, self._calls[name]


def named(model: nn.Module, batch: Any) -> dict[str, Any]:
    """Return a batch by the names of the model's arguments, with the tokens of its decoder.

    A model may make these itself; sequences alone have to be given the same.
    """
    if isinstance(batch, Mapping):
        found = dict(batch)
    else:
        found = dict(inspect.signature(model.forward).bind_partial(*batch).arguments)
    takes_ids = _IDS in inspect.signature(model.forward).parameters
    if not takes_ids or any(name in found for name in (_IDS, f"{_DECODER}inputs_embeds")):
        return found
    given: list[Any] = []
    get_decoder: Any = getattr(model, "get_decoder", None)
    if get_decoder is None:
        return found
    handle = get_decoder().register_forward_pre_hook(
        lambda _, args, kwargs: given.append(args[0] if args else kwargs.get("input_ids")),
        with_kwargs=True,
    )
    try:
        with torch.no_grad():
            model(**found)
    finally:
        handle.remove()
    if given and isinstance(given[0], torch.Tensor):
        found[_IDS] = given[0]
    return found


def valid_of(batch: Mapping[str, Any], prefix: str = "") -> torch.Tensor | None:
    """Return the valid tokens (batch, tokens) by the mask of a batch; None if it has none.

    In a mask of pairs, a token is valid if any query may see it.
    """
    mask = batch.get(f"{prefix}{_MASK}")
    if not isinstance(mask, torch.Tensor) or mask.dim() not in (2, 4):
        return None
    if mask.dim() == 4:
        mask = ((mask >= 0) if mask.is_floating_point() else (mask != 0)).flatten(1, 2).any(1)
    return mask.bool()


def sequences_of(batch: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the sequences of a padded batch, each as a batch of its own without padding."""
    main = valid_of(batch)
    ids = batch.get(_IDS)
    decoder = valid_of(batch, _DECODER)
    if decoder is None and isinstance(ids, torch.Tensor):
        decoder = torch.ones_like(ids, dtype=torch.bool)
    assert main is not None or decoder is not None
    for row in range(len(main if main is not None else decoder)):  # type: ignore[arg-type]
        if main is not None and not bool(main[row].any()):
            continue
        yield {
            key: _of_row(value, decoder if key.startswith(_DECODER) else main, row)
            for key, value in batch.items()
        }


def _of_row(value: Any, valid: torch.Tensor | None, row: int) -> Any:
    if not isinstance(value, torch.Tensor) or valid is None or len(value) != len(valid):
        return value
    own, kept = value[row : row + 1], valid[row]
    if value.dim() == 4 and value.shape[-2:] == (valid.shape[1], valid.shape[1]):
        return own[:, :, kept][..., kept]
    return own[:, kept] if value.shape[:2] == valid.shape else own
