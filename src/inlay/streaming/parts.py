"""The checkpoint of a streamed run, written a region at a time."""

import json
import operator
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from inlay.calibration import Calibration
from inlay.checkpoint.contents import Contents
from inlay.checkpoint.gate import require_servable, require_servable_part
from inlay.checkpoint.layers import quantized_layers
from inlay.checkpoint.shards import file_name, size_in_bytes, write_index, write_shard
from inlay.checkpoint.writing import finish_checkpoint
from inlay.errors import CheckpointError
from inlay.files import new_file
from inlay.observers import QParamsDict
from inlay.recipe import Plan
from inlay.streaming.journal import Journal, digest_of
from inlay.streaming.regions import Regions

__all__ = ["CheckpointParts", "load_qparams", "save_qparams"]


class CheckpointParts:
    """Writes the regions of a model, each into files of its own, and in the end all the rest.

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
        layers = quantized_layers(model, plan, calibration.recipe)
        self._contents = Contents.of(
            model, layers, plan.stacks.values(), calibration.equalization.parameters
        )

    def write(
        self, number: int, plan: Plan, qparams: Mapping[str, QParamsDict]
    ) -> dict[str, tuple[int, str]]:
        """Write a region whose parameters are in memory.

        :param plan: the part of the plan that belongs to the region
        :return: sizes and digests of the files, by name
        """
        full_precision = require_servable_part(plan, qparams, accept=self._accept)
        model, recipe = self._calibration.model, self._calibration.recipe
        layers = quantized_layers(model, plan, recipe, full_precision)
        names = [name for name in self._contents.unquantized if self._is_of(number, name)]
        kept = (f"{module}.weight" for module in sorted(full_precision))
        names += [name for name in kept if hasattr(_module(model, name), "weight")]
        plain = {name: operator.attrgetter(name)(model).detach() for name in names}
        tensors = self._contents.tensors(plain, layers, qparams)
        files = {}
        for index, part in enumerate(_cut(tensors, self._max_size)):
            name = f"region-{number:05d}-{index:03d}.safetensors"
            path = self._journal.checkpoint / name
            with new_file(path) as partial:
                write_shard(part, partial)
            files[name] = (path.stat().st_size, digest_of(path))
        return files

    def _is_of(self, number: int, name: str) -> bool:
        return self._regions.number_of_tensor(name) == number

    def finish(self, qparams: Mapping[str, QParamsDict], tokenizer: Any) -> int:
        """Name the files as transformers does, and write index, configs and tokenizer.

        :return: bytes of all tensors
        """
        calibration, folder = self._calibration, self._journal.checkpoint
        full_precision = require_servable(calibration.plan, qparams, accept=self._accept)
        names = [name for written in self._journal.written for name in written.files]
        weight_map: dict[str, str] = {}
        total = 0
        for index, name in enumerate(names):
            final = file_name(index, len(names))
            if (folder / name).exists():  # otherwise an interrupted run has named it
                (folder / name).rename(folder / final)
            with safe_open(folder / final, framework="pt") as opened:
                weight_map.update(dict.fromkeys(sorted(opened.keys()), final))
            total += _data_size(folder / final)
        model = calibration.model
        if len(names) > 1:
            parameters = sum(parameter.numel() for parameter in model.parameters())
            write_index(folder, weight_map, parameters=parameters, total_size=total)
        layers = quantized_layers(model, calibration.plan, calibration.recipe, full_precision)
        finish_checkpoint(
            folder,
            self._contents,
            calibration.plan,
            calibration.recipe,
            layers,
            tokenizer=tokenizer,
        )
        return total


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
        raise CheckpointError(
            f"{file}, which an interrupted run had written, cannot be read: {error}; remove the "
            "folder and start anew"
        ) from error
    return found


def _cut(tensors: Mapping[str, torch.Tensor], max_size: int) -> Iterator[dict[str, torch.Tensor]]:
    part: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in tensors.items():
        if part and size + tensor.nbytes > max_size:
            yield part
            part, size = {}, 0
        part[name] = tensor
        size += tensor.nbytes
    if part:
        yield part


def _module(model: torch.nn.Module, name: str) -> Any:
    return model.get_submodule(name.rpartition(".")[0])


def _data_size(file: Path) -> int:
    """Bytes of the tensors of a file, without its header."""
    with file.open("rb") as opened:
        return file.stat().st_size - 8 - int.from_bytes(opened.read(8), "little")
