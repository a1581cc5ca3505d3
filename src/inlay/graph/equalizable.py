"""What a graph says about equalization: groups in terms of its inputs, and why there are no more.

One graph may serve many blocks, so a group becomes one of the model only with the parameters that
the graph is called with.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

__all__ = ["Equalizable", "FoundGroup", "FoundProducer", "Lookup", "Source", "Use"]


@dataclass(frozen=True)
class Source:
    """Where a graph has a parameter from: one of its inputs, or an attribute of its module."""

    name: str
    is_input: bool


# Finds the very tensor that a graph is called with.
Lookup = Callable[[Source], torch.Tensor | None]


@dataclass(frozen=True, kw_only=True)
class FoundProducer:
    """A producer in a graph; see `Producer`."""

    source: Source
    axes: tuple[int, ...]
    offset: float = 0.0
    rows: tuple[tuple[int, int, int], ...] = ()


@dataclass(frozen=True, kw_only=True)
class FoundGroup:
    """A group in a graph; see `Group`.

    :param readers: the weights of the ops that read the value
    """

    readers: tuple[Source, ...]
    producers: tuple[FoundProducer, ...]
    shape: tuple[int, ...]
    tied: tuple[int, ...]
    stacked: int = 0


@dataclass(frozen=True)
class Use:
    """A use of a parameter by an op.

    :param role: "columns" and "rows" of a weight, which every Linear has; "vector" of a parameter
        that a group divides; "other" for all else
    :param group: the number of the group that scales the parameter in this role, if one does
    """

    source: Source
    role: str
    group: int | None


@dataclass(frozen=True, kw_only=True)
class Equalizable:
    """All that a graph says about equalization.

    :param refused: weights of ops whose input cannot be equalized, each with the reason
    :param uses: all uses of parameters
    """

    groups: tuple[FoundGroup, ...] = ()
    refused: tuple[tuple[Source, str], ...] = ()
    uses: tuple[Use, ...] = ()
