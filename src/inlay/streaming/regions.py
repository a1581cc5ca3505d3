"""The regions of a model: what is in memory together, from a block to the next."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from inlay.calibration.blocks import block_modules
from inlay.checkpoint.stored_model import StoredModel
from inlay.errors import ConfigurationError
from inlay.recipe import Plan
from inlay.streaming.stages import Started

__all__ = ["Region", "Regions"]

_BEFORE, _REST = "before the blocks", "the rest"


@dataclass(frozen=True, kw_only=True)
class Region:
    """A part of the model that is loaded, run, quantized, written and freed together.

    :param name: of the block, if it is one
    :param stage: of a batch that runs here; None if no batch does
    :param runs: names of the parameters that the stage reads
    :param writes: names of the parameters that no later region reads
    """

    name: str
    stage: int | None
    runs: tuple[str, ...]
    writes: tuple[str, ...]

    @property
    def parameters(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.runs, *self.writes)))


class Regions(Sequence[Region]):
    """All regions of a model, in the order in which batches run through them.

    :param started: a batch that shows what the model runs; None if no data is needed
    :param plan: a weight outside of the blocks whose inputs are observed waits for the last region
    :raises ConfigurationError: if the model cannot be cut
    """

    def __init__(self, stored: StoredModel, started: Started | None, plan: Plan) -> None:
        model, self._stored = stored.model, stored
        self._blocks = block_modules(model)
        if len(self._blocks) < 2:
            raise ConfigurationError(
                f"{type(model).__name__} cannot be streamed: it has {len(self._blocks)} blocks, "
                "and only a model of at least two can be cut; calibrate it in memory"
            )
        uses = list(_uses(stored, self._blocks, started))
        unused = set(stored.names_of(model.parameters())).difference(*(runs for *_, runs in uses))
        # The op that reads such a weight may be left out, as nothing depends on its result.
        waiting = (
            module.weight
            for name, module in model.named_modules(remove_duplicate=False)
            if plan.observes_in([name]) and not name.startswith(tuple(self._blocks))
        )
        rest = {*unused, *stored.names_of(w for w in waiting if isinstance(w, nn.Parameter))}
        uses.append((_REST, None, tuple(sorted(rest))))
        last = {name: number for number, (*_, runs) in enumerate(uses) for name in runs}
        self._regions = [
            Region(
                name=name,
                stage=stage,
                runs=runs if stage is not None else (),
                writes=tuple(each for each in runs if last[each] == number),
            )
            for number, (name, stage, runs) in enumerate(uses)
        ]
        self._of_weight = {
            id(parameter): last[name]
            for name, parameter in model.named_parameters()
            if name in last
        }
        self._modules = dict(model.named_modules(remove_duplicate=False))
        self._number = {region.name: number for number, region in enumerate(self._regions)}

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        return self._regions[index]

    def __len__(self) -> int:
        return len(self._regions)

    def load(self, region: Region) -> None:
        """Read the parameters of a region.

        Those outside of the blocks stay in their files until they are used: an embedding may be
        larger than a block, and few of its rows are.
        """
        prefixes = tuple(f"{name}." for name in self._blocks)
        inside = [name for name in region.parameters if name.startswith(prefixes)]
        self._stored.load(inside)
        self._stored.load([n for n in region.parameters if n not in set(inside)], mapped=True)

    def belongs_to(self, number: int) -> Callable[[str], bool]:
        """Return what tells whether a module belongs to a region."""
        return lambda module: self.number_of(module) == number

    def number_of(self, module: str) -> int:
        """Return which region a module belongs to: the one that writes its weight."""
        weight = getattr(self._modules.get(module), "weight", None)
        if weight is not None and id(weight) in self._of_weight:
            return self._of_weight[id(weight)]
        return self.number_of_name(module)

    def number_of_tensor(self, name: str) -> int:
        """Return which region writes a tensor of the model."""
        module, _, own = name.rpartition(".")
        tensor = getattr(self._modules.get(module), own, None)
        return self._of_weight.get(id(tensor), self.number_of_name(name))

    def number_of_name(self, name: str) -> int:
        """Return the region of the block that a name begins with; the last one if there is none."""
        parts = name.split(".")
        prefixes = itertools.accumulate(parts, lambda one, other: f"{one}.{other}")
        return next((self._number[p] for p in prefixes if p in self._number), len(self) - 1)


def _uses(
    stored: StoredModel, blocks: dict[str, nn.Module], started: Started | None
) -> Iterator[tuple[str, int | None, tuple[str, ...]]]:
    """Yield what runs, in order: a name, its stage, and the parameters that it reads."""
    names = {id(block): name for name, block in blocks.items()}
    reached: list[str] = []
    if started is not None:
        yield _BEFORE, 0, tuple(stored.names_of(started.parameters(0)))
        for stage, block in enumerate(started.graph.blocks, start=1):
            name = names[id(block)]
            if name in reached:
                raise ConfigurationError(
                    f"the model cannot be streamed: it runs {name} more than once for a batch; "
                    "calibrate it in memory"
                )
            reached.append(name)
            parameters = (*block.parameters(), *started.parameters(stage))
            yield name, stage, tuple(stored.names_of(parameters))
    for name, block in blocks.items():
        if name not in reached:
            yield name, None, tuple(stored.names_of(block.parameters()))
