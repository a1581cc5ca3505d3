"""The checkpoint of a streamed run, written a region at a time."""

import operator
from collections.abc import Collection, Mapping
from typing import Any

import torch

from inlay.calibration import Calibration
from inlay.checkpoint.contents import Contents
from inlay.checkpoint.gate import require_servable, require_servable_part
from inlay.checkpoint.layers import quantized_layers
from inlay.checkpoint.shards import Shard, Shards, size_in_bytes
from inlay.checkpoint.writing import finish_checkpoint
from inlay.engine.driver import Region
from inlay.engine.streamed.journal import Journal
from inlay.engine.streamed.regions import Regions
from inlay.observers import QParamsDict
from inlay.ranks.division import Part, share
from inlay.recipe import Plan

__all__ = ["RegionWriter"]


class RegionWriter:
    """Writes the regions of a model, each into files of its own, and in the end all the rest.

    Over ranks, each compresses some layers of a region and writes them into the file of all.

    :param calibration: of the model that is streamed
    :param accept: problems to accept instead of refusing, as in `Calibration.finalize`
    """

    def __init__(
        self,
        calibration: Calibration,
        regions: Regions,
        journal: Journal,
        *,
        max_shard_size: int | str,
        accept: Collection[str],
    ) -> None:
        self._calibration, self._regions, self._journal = calibration, regions, journal
        self._max_size, self._accept = size_in_bytes(max_shard_size), accept
        model, plan = calibration.model, calibration.plan
        layers = quantized_layers(model, plan)
        self._contents = Contents.of(model, plan, layers, calibration.graphs.weights)

    def own_part(self, plan: Plan) -> Plan:
        """Return the part of a region's plan that this rank compresses and judges."""
        names = dict.fromkeys(slot.module for slot in plan.slots.values())
        weights = {name: plan.weights.get(name) for name in names}
        costs = {name: 0 if weight is None else weight.numel for name, weight in weights.items()}
        own = set(share(costs, Part.own()))
        return plan.part(lambda module: module in own)

    def write(
        self, region: Region, plan: Plan, own: Plan, qparams: Mapping[str, QParamsDict]
    ) -> list[Shard]:
        """Write this rank's tensors of a region whose parameters are in memory.

        Every rank calls it. What the files hold does not depend on how many ranks there are.

        :param plan: the part of the plan that belongs to the region
        :param own: the part of that which this rank compresses
        :return: the files, which are complete when all ranks have written
        """
        tensors = self._own_tensors(region, plan, own, qparams)
        files = Shards(
            self._journal.checkpoint, region.number, self._max_size, writer=self._journal.writer
        )
        files.add(tensors, {name: name for name in tensors})
        return files.close()

    def _own_tensors(
        self, region: Region, plan: Plan, own: Plan, qparams: Mapping[str, QParamsDict]
    ) -> dict[str, torch.Tensor]:
        full_precision = require_servable_part(plan, qparams, accept=self._accept)
        model = self._calibration.model
        layers = quantized_layers(model, own, full_precision)
        names = [
            name
            for name in self._contents.unquantized
            if self._regions.number_of_tensor(name) == region.number
        ]
        kept = (plan.weights[name] for name in sorted(full_precision) if name in plan.weights)
        names += dict.fromkeys(view.parameter for view in kept)
        plain = {name: operator.attrgetter(name)(model).detach() for name in names}
        saved, of_layers = self._contents.tensors(plain, layers, qparams)
        others = {name: saved[name].nbytes for name in saved.keys() - of_layers}
        names = [*of_layers, *share(dict(sorted(others.items())), Part.own())]
        return {name: saved[name] for name in names}

    def finish(self, qparams: Mapping[str, QParamsDict], tokenizer: Any) -> int:
        """Finish the checkpoint; return the bytes of all its tensors."""
        calibration = self._calibration
        model, plan, recipe = calibration.model, calibration.plan, calibration.recipe
        full_precision = require_servable(plan, qparams, accept=self._accept)
        layers = quantized_layers(model, plan, full_precision)
        names = [name for written in self._journal.written for name in written.files]
        folder = self._journal.checkpoint
        return finish_checkpoint(folder, names, self._contents, plan, recipe, layers, tokenizer)
