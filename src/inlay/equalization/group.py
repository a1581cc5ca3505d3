"""Groups: readers of one value, and the parameters that take up a scale for each channel of it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

__all__ = ["Group", "Producer", "expert_named"]


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
    :param experts: how many experts have scales of their own; readers and producers are then the
        parameters that hold the weights of all
    :param expert: the number of the one whose part of these parameters is scaled
    """

    readers: tuple[str, ...]
    producers: tuple[Producer, ...]
    shape: tuple[int, ...]
    tied: tuple[int, ...] = ()
    experts: int = 0
    expert: int | None = None

    @property
    def name(self) -> str:
        return self.readers[0]

    def each(self) -> list["Group"]:
        """Return a group for each expert, or the group itself if it has none."""
        if not self.experts:
            return [self]
        return [
            replace(
                self,
                readers=tuple(expert_named(reader, number) for reader in self.readers),
                experts=0,
                expert=number,
            )
            for number in range(self.experts)
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
            experts=fields.get("experts", 0),
        )


def expert_named(parameter: str, number: int) -> str:
    """Return the name of an expert's Linear, of a parameter that holds the weights of all."""
    experts, _, projection = parameter.rpartition(".")
    return f"{experts}.{number}.{projection}"
