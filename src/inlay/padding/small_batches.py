"""Small batches like a given one, with sizes of batch and tokens that tell them apart."""

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from inlay.graph import MAIN
from inlay.padding.layouts import Sizes
from inlay.padding.valid_tokens import MASK, sequence_of

__all__ = ["BatchForm", "forms_of", "sizes_of_probes"]

_DECODER = "decoder_input_ids"
_OF_MAIN = {"input_ids", "inputs_embeds", "position_ids", "token_type_ids", MASK, "cache_position"}
# A model that is given fewer decoder tokens, or more, is not asked to compute a loss.
_LABELS = "labels"


@dataclass(frozen=True)
class BatchForm:
    """Which dimensions of the arguments of a model are the batch, and which are tokens of what.

    :param axes: by argument, a dimension and what it is: "batch" or the name of a sequence
    :param added: arguments that small batches have beside those of the batch
    :param left_out: arguments that they do not have
    """

    axes: Mapping[str, tuple[tuple[int, str], ...]]
    added: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()

    @property
    def key(self) -> Any:
        return tuple(sorted(self.axes.items())), self.added, self.left_out

    @property
    def sequences(self) -> list[str]:
        """The sequences that the arguments have tokens of, in order."""
        of_all = [what for axes in self.axes.values() for _, what in axes]
        of_all += [sequence_of(name) for name in self.added]
        return [what for what in dict.fromkeys(of_all) if what != "batch"]

    @property
    def uncertain(self) -> list[str]:
        """Sequences that are as long as the main one, of arguments that say nothing else of it."""
        return [what for what in self.sequences if what in self.axes]

    def joined(self, sequence: str) -> "BatchForm":
        """Return the form in which a sequence is the main one."""
        axes = {
            name: tuple((axis, MAIN if what == sequence else what) for axis, what in of_name)
            for name, of_name in self.axes.items()
        }
        return replace(self, axes=axes)

    def small(self, batch: Mapping[str, Any], sizes: Sizes) -> dict[str, Any]:
        """Return a batch of these sizes. Its rows and tokens are those of the batch, repeated."""
        found = {}
        for name, value in batch.items():
            if name in self.left_out:
                continue
            for axis, what in self.axes.get(name, ()):
                size = sizes.batch if what == "batch" else sizes.tokens[what]
                places = torch.arange(size, device=value.device) % value.shape[axis]
                value = value.index_select(axis, places)
            if name.endswith(MASK) and isinstance(value, torch.Tensor) and value.ndim == 2:
                value = torch.ones_like(value)
                value[0, -1] = 0  # models may look whether there is padding
            found[name] = value
        device = next((v.device for v in batch.values() if isinstance(v, torch.Tensor)), None)
        for name in self.added:
            shape = (sizes.batch, sizes.tokens[sequence_of(name)])
            found[name] = torch.zeros(shape, dtype=torch.int64, device=device)
        return found


def forms_of(
    model: nn.Module, batch: Mapping[str, Any], valid: Mapping[str, torch.Tensor]
) -> list[BatchForm]:
    """Return the forms that a batch may have, the usual one first.

    :param valid: the valid tokens of its sequences
    """
    parameters = inspect.signature(model.forward).parameters
    tensors = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}
    rows, lengths = _lengths(tensors, valid)
    is_seq2seq = _DECODER in parameters
    added: tuple[str, ...] = ()
    if is_seq2seq and not {_DECODER, "decoder_inputs_embeds"} & tensors.keys():
        added = (_DECODER,)
    labels = parameters.get(_LABELS)
    is_optional = labels is not None and labels.default is not inspect.Parameter.empty
    left_out = (_LABELS,) if _LABELS in batch and is_optional else ()
    found: list[BatchForm] = []
    for transposed in (False, True):
        axes = {}
        for name, value in tensors.items():
            sequence = _sequence(name, list(tensors), is_seq2seq)
            tokens = lengths.get(sequence, lengths.get(MAIN))
            axes[name] = tuple(_axes(value, rows, tokens, sequence, transposed))
        form = BatchForm(axes, added, left_out)
        if form not in found and any(what != "batch" for of in axes.values() for _, what in of):
            found.append(form)
    return found


def _lengths(
    tensors: Mapping[str, torch.Tensor], valid: Mapping[str, torch.Tensor]
) -> tuple[int, dict[str, int]]:
    """Return the number of rows of a batch, and the number of tokens of its sequences."""
    lengths = {sequence: mask.shape[1] for sequence, mask in valid.items()}
    for name, value in tensors.items():
        if value.ndim > 1:
            lengths.setdefault(sequence_of(name), value.shape[1])
    return next(iter(valid.values())).shape[0], lengths


def _sequence(name: str, names: list[str], is_seq2seq: bool) -> str:
    own = sequence_of(name)
    if name == _LABELS and is_seq2seq:
        return "decoder"
    if own != MAIN or name in _OF_MAIN:
        return own
    # The first argument holds the tokens. Others may be as long by chance.
    first = next(iter(each for each in names if not each.endswith(MASK)), name)
    return MAIN if name == first and not {"input_ids", "inputs_embeds"} & set(names) else name


def _axes(
    value: torch.Tensor, rows: int, tokens: int | None, sequence: str, transposed: bool
) -> Iterator[tuple[int, str]]:
    """Yield the meaning of the dimensions of an argument, judged by their sizes."""
    shape = list(value.shape)
    batch_at, tokens_at = (1, 0) if transposed and value.ndim > 2 else (0, 1)
    if value.ndim == 1:
        if shape[0] == rows:
            yield 0, "batch"
        elif shape[0] == tokens:
            yield 0, sequence
        return
    own_batch = _place(shape, rows, batch_at)
    if own_batch is not None:
        yield own_batch, "batch"
    if value.ndim > 2 and shape[-1] == shape[-2] == tokens and shape[0] == rows:
        yield from ((axis, sequence) for axis in (value.ndim - 2, value.ndim - 1))
        return
    left = [-1 if axis == own_batch else size for axis, size in enumerate(shape)]
    own_tokens = None if tokens is None else _place(left, tokens, tokens_at)
    if own_tokens is not None:
        yield own_tokens, sequence


def _place(shape: list[int], size: int, usual: int) -> int | None:
    """Return the dimension of a size: the usual one, or the only one."""
    if shape[usual] == size:
        return usual
    return shape.index(size) if shape.count(size) == 1 else None


def sizes_of_probes(
    model: nn.Module, sequences: list[str], most: int | None, least: int = 5
) -> list[Sizes]:
    """Return the sizes of small batches; each after the first differs from it in one size.

    :param most: tokens that a sequence may have; None for what is usual
    :param least: tokens that a sequence has at least, unless `most` is given
    """
    weights = {size for parameter in model.parameters() for size in parameter.shape}
    usual = range(least, least + 35)
    numbers = [n for n in usual if weights.isdisjoint((n, 2 * n, 3 * n))]
    numbers = numbers if len(numbers) >= 2 * len(sequences) else list(usual)
    if most is not None:
        numbers = list(range(max(1, most), 0, -1))
    numbers = (numbers + list(range(usual.stop, usual.stop + 40)))[: 2 * len(sequences)]
    tokens = dict(zip(sequences, numbers[0::2], strict=True))
    others = dict(zip(sequences, numbers[1::2], strict=True))
    found = [Sizes(2, tokens), Sizes(3, tokens)]
    return [*found, *(Sizes(2, {**tokens, name: others[name]}) for name in sequences)]
