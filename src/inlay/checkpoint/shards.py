"""Writing tensors to safetensors files of limited size, named as transformers names them."""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from inlay.checkpoint.shared_shard import Layout, TensorKind, write_tensors
from inlay.collectives import from_all_ranks
from inlay.errors import ConfigurationError
from inlay.files import complete_file, naming_failures, partial_name
from inlay.ranks.identity import is_first
from inlay.ranks.together import meet

__all__ = ["Shard", "Shards", "complete", "file_name", "name_files", "size_in_bytes"]

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


@dataclass(frozen=True, kw_only=True)
class Shard:
    """A file into which each rank has written its own tensors.

    :param path: its name when it is complete
    :param partial: its name until then
    :param digests: of the tensors that this rank has written
    """

    path: Path
    partial: Path
    layout: Layout
    digests: Mapping[str, str]


class Shards:
    """Writes the tensors of a region into files of limited size, each when it is full.

    Over ranks, every rank calls all methods, each with its own tensors. They write into the same
    files, which do not depend on how many ranks there are.

    :param region: number of the region, which names its files
    :param writer: tells apart who writes them, the same on all ranks
    :param digests: whether to compute digests of the tensors
    """

    def __init__(
        self, folder: Path, region: int, max_size: int, *, writer: str, digests: bool = True
    ) -> None:
        self._folder, self._region, self._max_size = folder, region, max_size
        self._writer, self._digests = writer, digests
        self._written: list[Shard] = []
        self._known: set[str] = set()
        self._pending: dict[str, TensorKind] = {}  # of all ranks
        self._pending_size = 0
        self._own: dict[str, torch.Tensor] = {}

    def add(self, tensors: Mapping[str, torch.Tensor], places: Mapping[str, Any]) -> None:
        """Add tensors. They must not change until they are written.

        :param places: order of all tensors that are added at once, over all ranks
        """
        own = [(places[name], name, TensorKind.of(name, each)) for name, each in tensors.items()]
        self._own.update({name: each.detach().cpu() for name, each in tensors.items()})
        of_ranks = from_all_ranks(own)
        of_all = (each for of_rank in of_ranks for each in of_rank)
        for _, name, kind in sorted(of_all, key=lambda each: each[:2]):
            if name in self._known:
                raise ConfigurationError(f"two tensors of the model would be saved as {name}")
            if self._pending and self._pending_size + kind.nbytes > self._max_size:
                self._write()
            self._known.add(name)
            self._pending[name] = kind
            self._pending_size += kind.nbytes

    def close(self) -> list[Shard]:
        """Write the last file; return all, which are complete when all ranks are here."""
        if self._pending:
            self._write()
        return self._written

    def _write(self) -> None:
        name = f"region-{self._region:05d}-{len(self._written):03d}.safetensors"
        path = self._folder / name
        partial, layout = partial_name(path, self._writer), Layout.of(self._pending)
        if is_first():
            with naming_failures(path, partial):
                layout.make(partial)
        meet()  # for the others to find the file
        own = {each: self._own.pop(each) for each in layout.begins if each in self._own}
        with naming_failures(path, partial):
            digests = write_tensors(partial, layout, own, digests=self._digests)
        self._written.append(Shard(path=path, partial=partial, layout=layout, digests=digests))
        self._pending, self._pending_size = {}, 0


def complete(shards: Iterable[Shard]) -> None:
    """Give files their names, once all ranks have written them. One rank calls it."""
    for shard in shards:
        with naming_failures(shard.path, shard.partial):
            complete_file(shard.partial, shard.path)


def name_files(folder: Path, names: Iterable[str], *, parameters: int) -> int:
    """Name complete files as transformers does, and write the index if there are several.

    :param names: those of the files, in order; an interrupted run may have renamed some
    :param parameters: how many parameters the model has, for the index
    :return: bytes of all tensors
    """
    names = list(names)
    weight_map: dict[str, str] = {}
    total = 0
    for index, name in enumerate(names):
        final = file_name(index, len(names))
        if (folder / name).exists():
            (folder / name).rename(folder / final)
        with safe_open(folder / final, framework="pt") as opened:
            weight_map.update(dict.fromkeys(sorted(opened.keys()), final))
        total += _data_size(folder / final)
    if len(names) > 1:
        metadata = {"total_parameters": parameters, "total_size": total}
        text = json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=2)
        (folder / "model.safetensors.index.json").write_text(text + "\n")
    return total


def _data_size(file: Path) -> int:
    """Bytes of the tensors of a file, without its header."""
    with file.open("rb") as opened:
        return file.stat().st_size - 8 - int.from_bytes(opened.read(8), "little")


def size_in_bytes(size: int | str) -> int:
    """Convert a size such as `"5GB"`. Units are KB, MB, GB, TB and KiB, MiB, GiB, TiB."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(size))
    if found is None or found[2].upper() not in _UNITS or float(found[1]) <= 0:
        raise ConfigurationError(f'{size!r} is not a size; write it as "5GB" or "500MB"')
    return int(float(found[1]) * _UNITS[found[2].upper()])


def file_name(index: int, count: int) -> str:
    """Return the name that transformers gives one of several files."""
    if count == 1:
        return "model.safetensors"
    return f"model-{index + 1:05d}-of-{count:05d}.safetensors"
