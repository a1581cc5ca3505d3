"""The weights of a model in safetensors files, found by name and read one by one."""

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from inlay.checkpoint.files.sentence_folders import leads_outside
from inlay.errors import CheckpointError, ConfigurationError
from inlay.fingerprints import fingerprints

__all__ = ["StoredTensor", "WeightFiles", "require_shards", "stored_names"]

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor in a file, as the header of the file describes it."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype

    def without_data(self) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


class WeightFiles:
    """The files with the weights of a model. To make one reads their headers and nothing else.

    :param folder: the folder of a model
    :raises CheckpointError: if a file is missing or damaged, or is not the one that the index means
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.stored: dict[str, StoredTensor] = {}
        expected = _expected(folder)
        for file, names in expected.items():
            found = _header(file)
            absent = sorted(names - found.keys())
            if absent:
                raise CheckpointError(
                    f"{file} has no tensor {absent[0]}, which {_INDEX} says it has; it is not the "
                    "file that belongs here, so copy or download it again"
                )
            self.stored.update(found)
        self.tensors = self.stored  # what `reading` gives
        self.files = tuple(expected)

    def identity(self) -> str:
        """Return a fingerprint of names, sizes and headers of the files."""
        found = hashlib.blake2b(digest_size=16)
        for file in self.files:
            with file.open("rb") as opened:
                length = int.from_bytes(opened.read(8), "little")
                header = opened.read(length)
            found.update(f"{file.name} {file.stat().st_size};".encode() + header)
        return found.hexdigest()

    def fingerprints(self) -> dict[str, str]:
        """Return fingerprints of all stored tensors; read no more than a sample of each."""
        with WeightFiles.reading(self) as read:  # as they are stored
            return fingerprints((name, read(name)) for name in self.stored)

    def is_mapped(self, name: str) -> bool:
        """Return whether a tensor that was read is backed by its file."""
        return True

    @contextlib.contextmanager
    def reading(self) -> Iterator[Callable[[str], torch.Tensor]]:
        """Yield a function that gives a tensor by name, backed by its file until it is copied."""
        with contextlib.ExitStack() as stack:
            opened: dict[Path, Any] = {}

            def read(name: str) -> torch.Tensor:
                file = self.stored[name].file
                try:
                    if file not in opened:
                        opened[file] = stack.enter_context(safe_open(file, framework="pt"))
                    tensor: torch.Tensor = opened[file].get_tensor(name)
                except (OSError, SafetensorError) as error:
                    raise _damaged(file, error) from error
                return tensor

            yield read


def require_shards(folder: Path) -> None:
    """Refuse an index that names files outside of the folder, and missing or damaged files."""
    if not any((folder / name).exists() for name in (_SINGLE, _INDEX)):
        return
    for file in _expected(folder):
        try:
            with safe_open(file, framework="pt"):
                pass  # which reads the header
        except (OSError, SafetensorError) as error:
            raise _damaged(file, error) from error


def stored_names(folder: Path) -> set[str]:
    """Return the names of all tensors in the files of a model; none if it has other files."""
    if not any((folder / name).exists() for name in (_SINGLE, _INDEX)):
        return set()
    names: set[str] = set()
    for file in _expected(folder):
        with safe_open(file, framework="pt") as opened:
            names.update(opened.keys())
    return names


def _expected(folder: Path) -> dict[Path, set[str]]:
    """Return the files of a model, and the tensors that its index, if it has one, expects there."""
    index = folder / _INDEX
    if (folder / _SINGLE).exists():
        return {folder / _SINGLE: set()}  # transformers prefers it to an index, too
    if not index.exists():
        raise ConfigurationError(
            f"{folder} has neither {_SINGLE} nor {_INDEX}; save the model with save_pretrained"
        )
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files: dict[Path, set[str]] = {}
        outside: dict[str, str] = {}
        for name, file in weight_map.items():
            files.setdefault(folder / file, set()).add(name)
            if leads_outside(file):
                outside[name] = file
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is no index of weights: {error}") from error
    if outside:
        name, file = next(iter(outside.items()))
        raise CheckpointError(
            f"{index} says that {name} is in {file}, outside of the model's folder; an index may "
            "name files of its own folder only. Copy or download the model again"
        )
    missing = sorted(str(file) for file in files if not file.is_file())
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CheckpointError(
            f"{missing[0]}{more}, named in {_INDEX}, is missing; copy or download the whole model"
        )
    return dict(sorted(files.items()))


def _header(file: Path) -> dict[str, StoredTensor]:
    found = {}
    try:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                part = opened.get_slice(name)
                found[name] = StoredTensor(
                    file=file, shape=tuple(part.get_shape()), dtype=_DTYPES[part.get_dtype()]
                )
    except KeyError as error:
        raise CheckpointError(f"{file} has tensors of type {error}, which cannot be read") from None
    except (OSError, SafetensorError) as error:
        raise _damaged(file, error) from error
    return found


def _damaged(file: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{file} cannot be read: {error}. It is truncated or damaged; copy or download it again"
    )
