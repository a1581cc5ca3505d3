"""Weight views: one matrix of a model, and how a parameter holds it."""

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

import torch

__all__ = ["Stack", "Weight"]


@dataclass(frozen=True, kw_only=True)
class Weight:
    """A view of one matrix that a layer multiplies by.

    :param module: the name of the Linear or Embedding that recipes and checkpoints know it by
    :param parameter: the name of the parameter that holds the matrix
    :param shape: (outputs, inputs)
    :param index: the place of the matrix in a stack; None if the parameter has two dimensions
    :param rows: the outputs of the parameter that belong to this matrix; None for all
    :param transposed: whether the parameter stores inputs before outputs
    :param bias: the name of the parameter with the bias, cut by the same index and rows
    """

    module: str
    parameter: str
    shape: tuple[int, int]
    index: int | None = None
    rows: range | None = None
    transposed: bool = False
    bias: str | None = None

    @property
    def is_whole(self) -> bool:
        """Whether the parameter is this matrix and nothing else."""
        return self.index is None and self.rows is None and not self.transposed

    @property
    def numel(self) -> int:
        return self.shape[0] * self.shape[1]

    def read(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the matrix, outputs first, as a view of a tensor of the parameter's layout."""
        matrix = parameter if self.index is None else parameter[self.index]
        if self.transposed:
            matrix = matrix.t()
        return self._rows_of(matrix)

    @property
    def nameless(self) -> "Weight":
        """The same view without names: equal for blocks that are alike."""
        return replace(self, module="", parameter="", bias=None)

    def outputs_of(self, value: torch.Tensor) -> torch.Tensor:
        """Return the outputs of this matrix, given those of all rows of the parameter.

        :param value: of shape (..., outputs)
        """
        return self._rows_of(value.mT).mT

    def read_bias(self, bias: torch.Tensor) -> torch.Tensor:
        """Return the bias of this matrix as a view of a tensor of the layout of `bias`."""
        return self._rows_of(bias if self.index is None else bias[self.index])

    def write(self, matrix: torch.Tensor, parameter: torch.Tensor) -> None:
        """Copy a matrix, outputs first, into its place in a tensor of the parameter's layout."""
        self.read(parameter).copy_(matrix)

    def _rows_of(self, outputs: torch.Tensor) -> torch.Tensor:
        if self.rows is None:
            return outputs
        return outputs[self.rows.start : self.rows.stop : self.rows.step]


@dataclass(frozen=True)
class Stack:
    """A parameter with many matrices, by which one op multiplies, each with its own rows.

    :param name: the name of the parameter
    :param weights: the matrices, in the order of their indices and rows
    """

    name: str
    weights: tuple[Weight, ...]

    @property
    def holder(self) -> str:
        """The name of the module that has the parameter."""
        return self.name.rpartition(".")[0]

    @cached_property
    def by_index(self) -> tuple[tuple[Weight, ...], ...]:
        """The weights at each index of the parameter, which read the same rows."""
        return tuple(tuple(own) for _, own in groupby(self.weights, lambda each: each.index))
