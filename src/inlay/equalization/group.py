"""Groups: readers of one value, and the parameters that take up a scale for each channel of it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from inlay.recipe import Plan

__all__ = ["Group", "Producer"]


@dataclass(frozen=True, kw_only=True)
class Producer:
    """A parameter that is divided by the scales: rows of a weight, or a vector such as a bias.

    :param parameter: its name in the model
    :param axes: axes of the group's channels along it, outermost first
    :param offset: what the model adds to the parameter before using it, such as 1 in Gemma's norm
    :param rows: if some rows only are divided, as the values in a projection of queries, keys and
        values: all rows as a grid, each side with its size, and where the part begins and how
        long it is
    """

    parameter: str
    axes: tuple[int, ...]
    offset: float = 0.0
    rows: tuple[tuple[int, int, int], ...] = ()

    def divided(self, value: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Return the parameter divided by scales along its first dimension."""
        if not self.rows:
            return self._divided(value, scale.reshape(-1, *[1] * (value.dim() - 1)))
        rest = value.shape[1:]
        grid = value.reshape(*(size for size, _, _ in self.rows), *rest).clone()
        part = tuple(slice(start, start + length) for _, start, length in self.rows)
        lengths = (length for _, _, length in self.rows)
        grid[part] = self._divided(grid[part], scale.reshape(*lengths, *[1] * len(rest)))
        return grid.reshape(value.shape)

    def _divided(self, value: torch.Tensor, along: torch.Tensor) -> torch.Tensor:
        return (value + self.offset) / along - self.offset if self.offset else value / along


@dataclass(frozen=True, kw_only=True)
class Group:
    """Linear modules that read one value, and the parameters that it is computed from.

    Dividing the producers by a positive scale for each channel, and multiplying the columns of the
    readers' weights by it, changes the value that is read and nothing else.

    :param readers: names of the modules
    :param shape: the channels as axes: heads, repeats of a head and the channels of one, say
    :param tied: axes along which all channels have the same scale
    :param stacked: how many matrices have scales of their own; readers and producers are then
        stacks of as many; 0 if they are no stacks
    :param index: the index of the matrix that is scaled in each stack
    """

    readers: tuple[str, ...]
    producers: tuple[Producer, ...]
    shape: tuple[int, ...]
    tied: tuple[int, ...] = ()
    stacked: int = 0
    index: int | None = None

    @property
    def name(self) -> str:
        return self.readers[0]

    def each(self, plan: Plan) -> list["Group"]:
        """Return a group for each matrix of the stacks, or the group itself if there are none."""
        if not self.stacked:
            return [self]
        readers = (plan.stacks[name].by_index for name in self.readers)
        return [
            replace(
                self,
                readers=tuple(weight.module for weights in own for weight in weights),
                stacked=0,
                index=index,
            )
            for index, own in enumerate(zip(*readers, strict=True))
        ]

    def tie(self, values: torch.Tensor) -> torch.Tensor:
        """Return the largest value among the channels that have one scale, for each channel."""
        if not self.tied:
            return values
        shaped = values.reshape(self.shape)
        return shaped.amax(self.tied, keepdim=True).expand(self.shape).reshape(-1)

    def scale_of(self, producer: Producer, scale: torch.Tensor) -> torch.Tensor:
        """Return the scales in the order in which the producer has its channels."""
        others = [axis for axis in range(len(self.shape)) if axis not in producer.axes]
        shaped = scale.reshape(self.shape).permute(*producer.axes, *others)
        return shaped.flatten(len(producer.axes))[..., 0].flatten() if others else shaped.flatten()

    def to_plain(self) -> dict[str, Any]:
        """Return the group as values that JSON keeps."""
        return asdict(self)

    @classmethod
    def from_plain(cls, fields: Mapping[str, Any]) -> "Group":
        """Read a group that `to_plain` returned, from JSON or not."""
        return cls(
            readers=tuple(fields["readers"]),
            producers=tuple(
                Producer(
                    parameter=producer["parameter"],
                    axes=tuple(producer["axes"]),
                    offset=producer["offset"],
                    rows=tuple(map(tuple, producer.get("rows", ()))),
                )
                for producer in fields["producers"]
            ),
            shape=tuple(fields["shape"]),
            tied=tuple(fields["tied"]),
            stacked=fields.get("stacked", 0),
        )
