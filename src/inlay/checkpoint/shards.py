"""Writing tensors to safetensors files of limited size, named as transformers names them."""

import json
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from inlay.errors import CheckpointError, ConfigurationError

__all__ = ["Shards", "file_name", "size_in_bytes", "write_index", "write_shard"]

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


class Shards:
    """A writer that takes tensors one after another and writes a file whenever it is full.

    File names include the number of files, so files are named when all are written.
    """

    def __init__(self, folder: Path, max_size: int) -> None:
        self.folder = folder
        self.max_size = max_size
        self.total_size = 0
        self._names: list[set[str]] = []  # names of tensors, for each written file
        self._pending: dict[str, torch.Tensor] = {}
        self._pending_size = 0
        self._addresses: set[int] = set()

    def add(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Add tensors. They must not change until the shards are closed."""
        for name, tensor in tensors.items():
            if name in self._pending or any(name in names for names in self._names):
                raise ConfigurationError(f"two tensors of the model would be saved as {name}")
            size = tensor.numel() * tensor.element_size()
            if self._pending and self._pending_size + size > self.max_size:
                self._write()
            self._pending[name] = self._own(tensor.detach().cpu().contiguous())
            self._pending_size += size
            self.total_size += size

    def _own(self, tensor: torch.Tensor) -> torch.Tensor:
        """Clone a tensor that shares memory with another: a file cannot hold it under two names."""
        if tensor.data_ptr() in self._addresses:
            tensor = tensor.clone()
        self._addresses.add(tensor.data_ptr())
        return tensor

    def _write(self) -> None:
        write_shard(self._pending, self._path(len(self._names)))
        self._names.append(set(self._pending))
        self._pending, self._pending_size, self._addresses = {}, 0, set()

    def _path(self, index: int) -> Path:
        return self.folder / f"shard-{index}.safetensors"

    def close(self, *, parameters: int) -> None:
        """Write the last file, name all files, and write the index if there are several.

        :param parameters: how many parameters the model has, for the index
        """
        if self._pending or not self._names:
            self._write()
        weight_map = {}
        for index, names in enumerate(self._names):
            final = file_name(index, len(self._names))
            self._path(index).rename(self.folder / final)
            weight_map.update(dict.fromkeys(sorted(names), final))
        if len(self._names) > 1:
            write_index(self.folder, weight_map, parameters=parameters, total_size=self.total_size)


def write_shard(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Write one file. Tensors that share memory are written as if they did not."""
    own: dict[str, torch.Tensor] = {}
    addresses: set[int] = set()
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        own[name] = tensor.clone() if tensor.data_ptr() in addresses else tensor
        addresses.add(own[name].data_ptr())
    try:
        save_file(own, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise CheckpointError(f"{error} (writing {path.name})") from error


def write_index(
    folder: Path, weight_map: Mapping[str, str], *, parameters: int, total_size: int
) -> None:
    """Write the index of several files.

    :param weight_map: names of files, by names of tensors
    """
    metadata = {"total_parameters": parameters, "total_size": total_size}
    text = json.dumps({"metadata": metadata, "weight_map": dict(weight_map)}, indent=2)
    (folder / "model.safetensors.index.json").write_text(text + "\n")


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
