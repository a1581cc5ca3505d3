"""The values of batches between two stages: on disk, and in memory too where they fit."""

import hashlib
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save, save_file

from inlay.engine.streamed.stages import Started
from inlay.errors import CheckpointError, GraphError
from inlay.files import remove_written
from inlay.ranks.identity import rank

__all__ = ["Activations"]

_VALUES = "values"  # metadata key of the layout of a file
_LASTING = "lasting"
_Key = tuple[int, bool]  # the number of a batch, and whether it passes through the equalized model


class Activations:
    """What batches have computed so far and later stages read, by batch.

    A generation is what all batches have before one stage. It is written while the stage before
    it runs, and is there as a whole when that stage is done, so a run that is killed goes on from
    the last one. A value that several stages read, such as a mask or a rotary table, is written
    once, and batches that have equal ones share one. Batches are known by their numbers among those
    of all ranks, which keep their values in one folder. A batch that also passes through the
    equalized model has values of its own there.

    :param folder: where the values are kept
    :param in_memory: keep the values in memory, to read nothing back
    :param on_disk: keep them on disk, for a run that goes on after it was killed
    """

    def __init__(self, folder: Path, *, in_memory: bool, on_disk: bool = True) -> None:
        self.folder, self._in_memory, self._on_disk = folder, in_memory, on_disk
        self._values: dict[_Key, dict[str, Any]] = {}  # values that only one stage uses
        self._lasting: dict[_Key, dict[str, str]] = {}  # digests of values by name
        self._shared: dict[str, torch.Tensor] = {}  # by digest, if they are in memory
        self._verified: set[str] = set()  # digests of shared values that were read back
        self._checks: dict[str, int] = {}  # checksums of the files of the newest generation

    def of(self, batch: int, stage: int, *, equalized: bool = False) -> dict[str, Any]:
        """What a batch has before a stage, in the model as it is or in the equalized one."""
        if stage == 0:
            return {}
        key = batch, equalized
        values = self._values.pop(key) if self._in_memory else self._read(key, stage)
        lasting = {name: self._share(digest) for name, digest in self._lasting[key].items()}
        return {**values, **lasting}

    def keep(
        self,
        batch: int,
        stage: int,
        values: Mapping[str, Any],
        started: Started,
        *,
        equalized: bool = False,
    ) -> None:
        """Keep the activations of a batch before a stage, of the plain or the equalized model."""
        own: dict[str, Any] = {}
        key = batch, equalized
        lasting = self._lasting.get(key, {})
        kept: dict[str, str] = {}
        for name, value in values.items():
            if name in lasting:
                kept[name] = lasting[name]
            elif isinstance(value, torch.Tensor) and started.graph.lasts(name, stage):
                kept[name] = self._keep_lasting(value)
            else:
                own[name] = value
        self._lasting[key] = kept
        if self._in_memory:
            self._values[key] = own
        if self._on_disk:
            self._write(self._file(key, stage), own, kept)

    def complete(self) -> dict[str, int]:
        """Return checksums of what this rank has written of a generation, which is all of it."""
        for digest in list(self._shared):
            if not any(digest in kept.values() for kept in self._lasting.values()):
                del self._shared[digest]
        found, self._checks = self._checks, {}
        return found

    def drop(self, stage: int) -> None:
        """Delete a generation that nobody reads any more."""
        remove_written(self._generation(stage), "*.safetensors")

    def restore(
        self,
        stage: int,
        batches: Iterable[int],
        checks: Mapping[str, int],
        *,
        equalized: bool = False,
    ) -> None:
        """Take up a generation that an interrupted run has written.

        :param batches: the numbers of this rank's batches
        :param equalized: take up the values that they have in the equalized model
        :raises CheckpointError: if a file of it is missing or was changed
        """
        for batch in batches:
            key = batch, equalized
            file = self._file(key, stage)
            content = file.read_bytes() if file.exists() else b""
            if checks.get(file.name) != zlib.crc32(content):
                raise CheckpointError(
                    f"{file}, the values that an interrupted run had kept, is missing or was "
                    "changed; remove the folder and start anew"
                )
            own = self._read(key, stage)
            for digest in self._lasting[key].values():
                if digest not in self._verified:
                    self._verify(digest)
            if self._in_memory:
                self._values[key] = own

    def _generation(self, stage: int) -> Path:
        return self.folder / f"before-{stage:05d}"

    def _file(self, key: _Key, stage: int) -> Path:
        batch, equalized = key
        name = f"{batch:06d}-equalized" if equalized else f"{batch:06d}"
        return self._generation(stage) / f"{name}.safetensors"

    def _keep_lasting(self, value: torch.Tensor) -> str:
        packed, layout = _packed(value)
        digest = _digest_of(packed, layout)
        file = self._lasting_file(digest)
        if self._on_disk and not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            partial = file.with_suffix(f".{rank()}.partial")  # another rank may write the same
            save_file({"value": packed}, partial, metadata={_VALUES: json.dumps(layout)})
            partial.rename(file)
        if self._in_memory:
            self._shared.setdefault(digest, value)
        return digest

    def _verify(self, digest: str) -> None:
        """Refuse a shared value that is not the one that the interrupted run had kept."""
        file = self._lasting_file(digest)
        tensors, text = _load(file)
        if _digest_of(tensors["value"], json.loads(text)) != digest:
            raise CheckpointError(
                f"{file}, a value that an interrupted run had kept, was changed; remove the "
                "folder and start anew"
            )
        self._verified.add(digest)

    def _lasting_file(self, digest: str) -> Path:
        return self.folder / _LASTING / f"{digest}.safetensors"

    def _share(self, digest: str) -> torch.Tensor:
        if digest in self._shared:
            return self._shared[digest]
        tensors, text = _load(self._lasting_file(digest))
        value = _unpacked(tensors["value"], json.loads(text))
        if self._in_memory:
            self._shared[digest] = value
        return value

    def _write(self, file: Path, own: Mapping[str, Any], lasting: Mapping[str, str]) -> None:
        tensors: dict[str, torch.Tensor] = {}
        described = {name: _described(value, name, tensors) for name, value in own.items()}
        text = json.dumps({"own": described, "lasting": dict(lasting)})
        file.parent.mkdir(parents=True, exist_ok=True)
        content = save(tensors, metadata={_VALUES: text})
        self._checks[file.name] = zlib.crc32(content)
        file.write_bytes(content)

    def _read(self, key: _Key, stage: int) -> dict[str, Any]:
        tensors, text = _load(self._file(key, stage))
        content = json.loads(text)
        self._lasting[key] = content["lasting"]
        return {name: _value(how, tensors) for name, how in content["own"].items()}


def _load(file: Path) -> tuple[dict[str, torch.Tensor], str]:
    try:
        with safe_open(file, framework="pt") as opened:
            text = (opened.metadata() or {})[_VALUES]
            # Copies, since products of matrices may depend on how their operands are aligned.
            return {key: opened.get_tensor(key).clone() for key in opened.keys()}, text  # noqa: SIM118
    except (OSError, SafetensorError, KeyError) as error:
        raise CheckpointError(
            f"{file}, values between two blocks, cannot be read: {error}; remove the folder and "
            "start anew"
        ) from error


def _described(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Describe a value as JSON, with its tensors put aside under names."""
    if isinstance(value, torch.Tensor):
        packed, layout = _packed(value)
        if any(packed.data_ptr() == other.data_ptr() for other in tensors.values()):
            packed = packed.clone()  # a file holds nothing twice without a copy
        tensors[name] = packed
        return {"tensor": name, "layout": layout, "device": str(value.device)}
    if isinstance(value, (list, tuple)):
        items = [_described(each, f"{name}.{i}", tensors) for i, each in enumerate(value)]
        return {"tuple" if isinstance(value, tuple) else "list": items}
    if value is None or isinstance(value, (bool, int, float, str)):
        return {"plain": value}
    raise GraphError(
        f"a value between two blocks is a {type(value).__name__}, which cannot be kept on disk; "
        "calibrate the model in memory"
    )


def _value(how: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Any:
    if "tensor" in how:
        return _unpacked(tensors[how["tensor"]].to(how["device"]), how["layout"])
    if "plain" in how:
        return how["plain"]
    items = [_value(each, tensors) for each in how.get("tuple", how.get("list", ()))]
    return tuple(items) if "tuple" in how else items


def _packed(value: torch.Tensor) -> tuple[torch.Tensor, Sequence[Sequence[int]]]:
    """Return the elements of a tensor without gaps, and what restores its layout.

    Kernels are chosen by strides, so a value that was on disk must have those that it had.
    """
    sizes, strides = list(value.shape), list(value.stride())
    for dim, stride in enumerate(strides):
        if stride == 0 and sizes[dim] > 1:
            value = value.narrow(dim, 0, 1)  # all the same
    order = sorted(range(value.dim()), key=lambda dim: -strides[dim])
    packed = value.permute(order).contiguous() if value.dim() else value.clone()
    return packed.detach().cpu(), [sizes, order]


def _unpacked(packed: torch.Tensor, layout: Sequence[Sequence[int]]) -> torch.Tensor:
    sizes, order = layout
    inverse = [order.index(dim) for dim in range(len(order))]
    return packed.permute(inverse).expand(sizes) if order else packed


def _digest_of(packed: torch.Tensor, layout: Sequence[Sequence[int]]) -> str:
    """Return a digest of a value and its layout."""
    content = hashlib.blake2b(json.dumps([layout, str(packed.dtype)]).encode(), digest_size=16)
    content.update(_bytes_of(packed))
    return content.hexdigest()


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    flat = tensor.reshape(-1).clone(memory_format=torch.contiguous_format)
    return memoryview(flat.view(torch.uint8).numpy().data)
