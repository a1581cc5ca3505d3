"""A safetensors file that several processes write at once, each its own tensors in their places."""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from inlay.errors import ConfigurationError

__all__ = ["Layout", "TensorKind", "digest_of", "write_tensors"]

# In the order in which safetensors puts them into a file, from the last to the first.
_DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.float32: "F32",
    torch.complex64: "C64",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.uint64: "U64",
}
_PLACES = {name: place for place, name in enumerate(_DTYPES.values())}
_AT_ONCE = 1 << 20  # bytes, which a cache keeps from being hashed to being written


@dataclass(frozen=True)
class TensorKind:
    """What a process has to know of a tensor that another one writes."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> "TensorKind":
        if tensor.dtype not in _DTYPES:
            raise ConfigurationError(
                f"{name} is of {tensor.dtype}, which a safetensors file cannot hold; ignore its "
                "module in the recipe, or load the model in another dtype"
            )
        return cls(_DTYPES[tensor.dtype], tuple(tensor.shape), tensor.nbytes)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where the tensors of a file stand, the same for all who know their kinds.

    :param header: the beginning of the file
    :param begins: the place of the first byte of each tensor, in the order of the file
    :param size: of the file
    """

    header: bytes
    begins: Mapping[str, int]
    size: int

    @classmethod
    def of(cls, kinds: Mapping[str, TensorKind]) -> "Layout":
        """Lay out a file as safetensors does."""
        described: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offsets: dict[str, int] = {}
        end = 0
        for name in sorted(kinds, key=lambda name: (-_PLACES[kinds[name].dtype], name)):
            kind, begin = kinds[name], end
            end += kind.nbytes
            offsets[name] = begin
            place = {"shape": kind.shape, "data_offsets": [begin, end]}
            described[name] = {"dtype": kind.dtype, **place}
        text = json.dumps(described, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        header = len(text).to_bytes(8, "little") + text
        begins = {name: len(header) + offset for name, offset in offsets.items()}
        return cls(header=header, begins=begins, size=len(header) + end)

    def make(self, file: Path) -> None:
        """Make a file with all its room, for each process to fill its part.

        A process of another machine that took the file for a shorter one could fill up pages that
        it shares with others by zeros.
        """
        with file.open("xb") as opened:
            opened.write(self.header)
            opened.truncate(self.size)

    def digest(self, of_tensors: Mapping[str, str]) -> str:
        """Return a fingerprint of the content of a file from those of all of its tensors."""
        return _combined(self.header, (of_tensors[name] for name in self.begins))


def write_tensors(
    file: Path, layout: Layout, tensors: Mapping[str, torch.Tensor], *, digests: bool = True
) -> dict[str, str]:
    """Write some tensors of a file that was made; return digests of them, if asked for.

    They are on the disk when this returns.
    """
    found = {}
    descriptor = os.open(file, os.O_WRONLY)
    try:
        for name, tensor in tensors.items():
            digest = hashlib.blake2b(digest_size=16)
            content, place = _bytes_of(tensor), layout.begins[name]
            for begin in range(0, len(content), _AT_ONCE):
                part = content[begin : begin + _AT_ONCE]
                if digests:
                    digest.update(part)
                _write(descriptor, part, place + begin)
            found[name] = digest.hexdigest()
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return found if digests else {}


def digest_of(file: Path) -> str:
    """Return the fingerprint of a file that `Layout.digest` has told of its tensors.

    :raises ValueError: if the file is no safetensors file
    """
    size = file.stat().st_size
    with file.open("rb") as opened:
        start = opened.read(8)
        header = start + opened.read(min(int.from_bytes(start, "little"), size))
        described = json.loads(header[8:])
        described.pop("__metadata__", None)
        digests = []
        for each in described.values():
            begin, end = each["data_offsets"]
            if not 0 <= begin <= end <= size:
                raise ValueError(f"{file} has no bytes {begin} to {end}")
            found = hashlib.blake2b(digest_size=16)
            opened.seek(len(header) + begin)
            for place in range(begin, end, _AT_ONCE):
                found.update(opened.read(min(_AT_ONCE, end - place)))
            digests.append(found.hexdigest())
    return _combined(header, digests)


def _combined(header: bytes, digests: Iterable[str]) -> str:
    content = header + "".join(digests).encode()
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the elements of a tensor as a file holds them, without a copy where that is so."""
    dense = tensor.detach().cpu().contiguous()
    flat = dense.as_strided((dense.numel(),), (1,))  # one element alone may have any stride
    unsigned = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}
    size = flat.element_size()
    little = flat.view(unsigned[size]).numpy().astype(f"<u{size}", copy=False)
    return memoryview(little.view("u1").data)


def _write(descriptor: int, content: memoryview, place: int) -> None:
    while content:
        count = os.pwrite(descriptor, content, place)
        content, place = content[count:], place + count
