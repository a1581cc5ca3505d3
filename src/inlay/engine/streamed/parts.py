"""The checkpoint of a streamed run, written a region at a time."""

import json
import operator
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from inlay.calibration import Calibration
from inlay.checkpoint.contents import Contents
from inlay.checkpoint.gate import require_servable, require_servable_part
from inlay.checkpoint.layers import quantized_layers
from inlay.checkpoint.shards import Shard, Shards, name_files, size_in_bytes
from inlay.checkpoint.writing import finish_checkpoint
from inlay.engine.streamed.journal import Journal
from inlay.engine.streamed.regions import Regions
from inlay.errors import CheckpointError
from inlay.files import new_file
from inlay.observers import QParamsDict
from inlay.ranks.division import Part, share
from inlay.recipe import Plan

__all__ = [
    "CheckpointParts",
    "load_qparams",
    "load_tensors",
    "save_qparams",
    "save_tensors",
]


class CheckpointParts:
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
        self._contents = Contents.of(model, plan, layers, calibration.weights)

    def own_part(self, plan: Plan) -> Plan:
        """Return the part of a region's plan that this rank compresses and judges."""
        names = dict.fromkeys(slot.module for slot in plan.slots.values())
        weights = {name: plan.weights.get(name) for name in names}
        costs = {name: 0 if weight is None else weight.numel for name, weight in weights.items()}
        own = set(share(costs, Part.own()))
        return plan.part(lambda module: module in own)

    def write(
        self, number: int, plan: Plan, own: Plan, qparams: Mapping[str, QParamsDict]
    ) -> list[Shard]:
        """Write this rank's tensors of a region whose parameters are in memory.

        Every rank calls it. What the files hold does not depend on how many ranks there are.

        :param plan: the part of the plan that belongs to the region
        :param own: the part of that which this rank compresses
        :return: the files, which are complete when all ranks have written
        """
        tensors = self._own_tensors(number, plan, own, qparams)
        files = Shards(
            self._journal.checkpoint, number, self._max_size, writer=self._journal.writer
        )
        files.add(tensors, {name: name for name in tensors})
        return files.close()

    def _own_tensors(
        self, number: int, plan: Plan, own: Plan, qparams: Mapping[str, QParamsDict]
    ) -> dict[str, torch.Tensor]:
        full_precision = require_servable_part(plan, qparams, accept=self._accept)
        model = self._calibration.model
        layers = quantized_layers(model, own, full_precision)
        names = [name for name in self._contents.unquantized if self._is_of(number, name)]
        kept = (plan.weights[name] for name in sorted(full_precision) if name in plan.weights)
        names += dict.fromkeys(view.parameter for view in kept)
        plain = {name: operator.attrgetter(name)(model).detach() for name in names}
        quantized, others = self._contents.tensors(plain, layers, qparams)
        own_others = share({name: tensor.nbytes for name, tensor in others.items()}, Part.own())
        return {**quantized, **{name: others[name] for name in own_others}}

    def _is_of(self, number: int, name: str) -> bool:
        return self._regions.number_of_tensor(name) == number

    def finish(self, qparams: Mapping[str, QParamsDict], tokenizer: Any) -> int:
        """Name the files as transformers does, and write index, configs and tokenizer.

        :return: bytes of all tensors
        """
        calibration, folder = self._calibration, self._journal.checkpoint
        full_precision = require_servable(calibration.plan, qparams, accept=self._accept)
        model = calibration.model
        names = [name for written in self._journal.written for name in written.files]
        parameters = sum(parameter.numel() for parameter in model.parameters())
        total = name_files(folder, names, parameters=parameters)
        layers = quantized_layers(model, calibration.plan, full_precision)
        finish_checkpoint(
            folder,
            self._contents,
            calibration.plan,
            calibration.recipe,
            layers,
            tokenizer=tokenizer,
        )
        return total


def save_tensors(tensors: Mapping[str, torch.Tensor], file: Path) -> None:
    """Keep tensors on disk."""
    with new_file(file) as partial:
        save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, partial)


def load_tensors(file: Path, device: torch.device) -> dict[str, torch.Tensor]:
    """Read tensors; on a CPU they stay in the file until they are used."""
    try:
        with safe_open(file, framework="pt") as opened:
            return {name: opened.get_tensor(name).to(device) for name in opened.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise _unreadable(file, error) from error


def save_qparams(qparams: Mapping[str, QParamsDict], file: Path) -> None:
    """Keep qparams on disk; those of all weights of a large model do not fit into memory."""
    tensors = {
        f"{slot}/{key}": value.detach().cpu().contiguous().clone()  # a file holds nothing twice
        for slot, own in qparams.items()
        for key, value in own.items()
        if isinstance(value, torch.Tensor)
    }
    with new_file(file) as partial:
        save_file(tensors, partial, metadata={"slots": json.dumps(list(qparams))})


def load_qparams(file: Path, device: torch.device) -> dict[str, QParamsDict]:
    """Read qparams; on a CPU they stay in the file until they are used."""
    try:
        with safe_open(file, framework="pt") as opened:
            found: dict[str, Any] = {n: {} for n in json.loads(opened.metadata()["slots"])}
            for name in opened.keys():  # noqa: SIM118
                slot, _, key = name.rpartition("/")
                found[slot][key] = opened.get_tensor(name).to(device)
    except (OSError, SafetensorError) as error:
        raise _unreadable(file, error) from error
    return found


def _unreadable(file: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{file}, which an interrupted run had written, cannot be read: {error}; remove the "
        "folder and start anew"
    )
