"""The regions of a model: what is in memory together, from a block to the next."""

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from inlay.calibration.tracing.blocks import block_modules
from inlay.checkpoint.stored_model import StoredModel
from inlay.collectives import from_all_ranks
from inlay.engine.driver import Region
from inlay.engine.streamed.stages import Started
from inlay.errors import ConfigurationError
from inlay.ranks.identity import size
from inlay.recipe import Plan

__all__ = ["Regions", "Segment", "segments_of", "segments_of_all_ranks"]

_BEFORE, _REST = "before the blocks", "the rest"


@dataclass(frozen=True)
class Segment:
    """A segment of the model that a batch runs through at once, or would if it came there.

    :param name: of the block, if it is one
    :param stage: of a batch; None if no batch comes there
    :param parameters: names of those that are read
    """

    name: str
    stage: int | None
    parameters: tuple[str, ...]


class Regions(Sequence[Region]):
    """All regions of a model, in the order in which batches run through them.

    :param segments: segments of the model, in the order of execution
    :param plan: a weight outside of the blocks whose inputs are observed waits for the last region,
        and so does all that equalization may scale with it
    :raises ConfigurationError: if the model cannot be cut
    """

    def __init__(self, stored: StoredModel, segments: Sequence[Segment], plan: Plan) -> None:
        model, self._stored, self._plan = stored.model, stored, plan
        blocks = block_modules(model)
        self._prefixes = tuple(f"{name}." for name in blocks)
        if len(blocks) < 2:
            raise ConfigurationError(
                f"{type(model).__name__} cannot be streamed: it has {len(blocks)} blocks, "
                "and only a model of at least two can be cut; calibrate it in memory"
            )
        used = {name for segment in segments for name in segment.parameters}
        unused = set(stored.names_of(model.parameters())) - used
        # The op that reads such a weight may be left out, as nothing depends on its result.
        waiting = (
            module.weight
            for name, module in model.named_modules(remove_duplicate=False)
            if plan.observes_in([name]) and not name.startswith(self._prefixes)
        )
        rest = {*unused, *stored.names_of(w for w in waiting if isinstance(w, nn.Parameter))}
        if plan.recipe.equalize is not None:
            rest |= self._outside_of_blocks(segments)
        segments = [*segments, Segment(_REST, None, tuple(sorted(rest)))]
        last = {
            name: number for number, segment in enumerate(segments) for name in segment.parameters
        }
        self._regions = [
            Region(
                number=number,
                name=segment.name,
                stage=segment.stage,
                runs=segment.parameters if segment.stage is not None else (),
                writes=tuple(name for name in segment.parameters if last[name] == number),
            )
            for number, segment in enumerate(segments)
        ]
        self._of_weight = {
            id(parameter): last[name]
            for name, parameter in model.named_parameters()
            if name in last
        }
        self._modules = dict(model.named_modules(remove_duplicate=False))
        self._number = {region.name: number for number, region in enumerate(self._regions)}

    def _outside_of_blocks(self, segments: Sequence[Segment]) -> set[str]:
        """Return the parameters outside of the blocks that equalization may scale.

        :raises ConfigurationError: if blocks share a parameter, which may not be scaled in one of
            them when another has been written
        """
        modules = self._stored.model.modules()
        embeddings = (module.weight for module in modules if isinstance(module, nn.Embedding))
        found: set[str] = set()
        inside: set[str] = set()
        for segment in segments:
            own = {name for name in segment.parameters if name.startswith(self._prefixes)}
            if own & inside:
                raise ConfigurationError(
                    f"a streamed run cannot equalize this model: {sorted(own & inside)[0]} belongs "
                    "to several blocks; leave equalize out, or calibrate in memory"
                )
            inside |= own
            found |= set(segment.parameters) - own
        # They may be larger than a block, and no op that looks up rows lets a scale through.
        return found - set(self._stored.names_of(embeddings))

    def scaled_in(self, groups: Mapping[str, Collection[str]]) -> dict[int, set[str]]:
        """Return which parameters are scaled once all batches have run through a region.

        :param groups: names of the parameters that are scaled together, by the name of the group
        :raises ConfigurationError: if batches meet a group in several regions: its scales are known
            after the last one, and observing equalized inputs needs them from the first one on
        """
        found: dict[int, set[str]] = {}
        for group, scaled in groups.items():
            # A product that nothing depends on is left out, and its weight is read by no region.
            met = [n for n, region in enumerate(self) if not set(scaled).isdisjoint(region.runs)]
            if len(met) != 1:
                raise ConfigurationError(
                    f"a streamed run cannot observe the equalized input of {group}, which is "
                    "computed or read around several blocks; observe inputs with static_minmax, "
                    "leave equalize out, or calibrate in memory"
                )
            found.setdefault(met[0], set()).update(scaled)
        return found

    def is_outside(self, name: str) -> bool:
        """Return whether a parameter is outside of the blocks."""
        return not name.startswith(self._prefixes)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        return self._regions[index]

    def __len__(self) -> int:
        return len(self._regions)

    def load(self, region: Region) -> None:
        """Read the parameters of a region.

        Those outside of the blocks stay in their files until they are used: an embedding may be
        larger than a block, and few of its rows are. So do all over several ranks, for those of one
        machine to share what was read.
        """
        inside = [name for name in region.parameters if name.startswith(self._prefixes)]
        self._stored.load(inside, mapped=size() > 1)
        self._stored.load([n for n in region.parameters if n not in set(inside)], mapped=True)

    def needed_after(self, number: int) -> set[str]:
        """Return the parameters of the region that follows."""
        following = self._regions[number + 1 : number + 2]
        return {name for region in following for name in region.parameters}

    def plan_of(self, region: Region) -> Plan:
        """Return the part of the plan that belongs to a region."""
        return self._plan.part(lambda module: self.number_of(module) == region.number)

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


def segments_of_all_ranks(stored: StoredModel, started: Started | None) -> list[Segment]:
    """Return what the model runs, on ranks without batches too. Every rank calls it.

    :param started: a batch of this rank; None if it has none
    :raises ConfigurationError: if ranks have batches that run through other blocks
    """
    of_ranks = from_all_ranks(None if started is None else segments_of(stored, started))
    known = [segments for segments in of_ranks if segments is not None] or [
        segments_of(stored, None)
    ]
    if any(own != known[0] for own in known):
        raise ConfigurationError(
            "the model cannot be streamed on several processes: the batches of some run through "
            "other blocks than those of others; stream it in one process"
        )
    return known[0]


def segments_of(stored: StoredModel, started: Started | None) -> list[Segment]:
    """Return what the model runs, in order, as far as a batch shows it."""
    return list(_segments(stored, block_modules(stored.model), started))


def _segments(
    stored: StoredModel, blocks: dict[str, nn.Module], started: Started | None
) -> Iterator[Segment]:
    names = {id(block): name for name, block in blocks.items()}
    reached: list[str] = []
    if started is not None:
        yield Segment(_BEFORE, 0, tuple(stored.names_of(started.parameters(0))))
        for stage, block in enumerate(started.graph.blocks, start=1):
            name = names[id(block)]
            if name in reached:
                raise ConfigurationError(
                    f"the model cannot be streamed: it runs {name} more than once for a batch; "
                    "calibrate it in memory"
                )
            reached.append(name)
            parameters = (*block.parameters(), *started.parameters(stage))
            yield Segment(name, stage, tuple(stored.names_of(parameters)))
    for name, block in blocks.items():
        if name not in reached:
            yield Segment(name, None, tuple(stored.names_of(block.parameters())))
