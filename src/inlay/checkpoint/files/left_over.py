"""Tensors in a model's files that the model does not use, such as layers that predict ahead."""

import json
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from inlay.checkpoint.files.dequantized import open_files
from inlay.checkpoint.files.weight_files import WeightFiles, stored_names
from inlay.run_record import model_name
from inlay.transformers_private import Loading

__all__ = ["LeftOver", "warn_of_unused"]

_NAMED = 3
# Constants that older versions of transformers stored, and that models compute now.
_COMPUTED = re.compile(r"(^|\.)(rotary_emb\.inv_freq|attn\.(masked_)?bias|position_ids)$")
_FILE_SIZE = 10**9  # of files with copies, which are in memory one at a time


@dataclass(frozen=True, kw_only=True)
class LeftOver:
    """Tensors that a checkpoint takes over from the files of its model.

    transformers has no modules for layers that predict several tokens; servers load them.

    :param names: the names of the tensors, in the files and in the checkpoint
    """

    files: WeightFiles
    names: tuple[str, ...]

    @classmethod
    def of(cls, model: Any, folder: Path) -> "LeftOver | None":
        """Return what a model leaves over of a folder that it was loaded from; None if nothing."""
        if not _is_whole(model, folder) or not stored_names(folder):  # or of another format
            return None
        files = open_files(folder)
        names = _unused(model, files.tensors, Loading.of(model))
        return cls(files=files, names=tuple(names)) if names else None

    @property
    def ignored(self) -> list[str]:
        """Targets that keep a loader from looking for quantized weights in these tensors."""
        blocks = dict.fromkeys(_block_of(name) for name in self.names)
        return [f"re:{re.escape(block)}($|[.].*)" for block in blocks]

    def copy_to(self, folder: Path) -> list[str]:
        """Write the tensors into files of their own; return the names of the files."""
        written: list[str] = []
        with self.files.reading() as read:
            for names in self._chunks():
                written.append(f"left-over-{len(written):05d}.safetensors")
                tensors = {name: read(name).contiguous() for name in names}
                save_file(tensors, folder / written[-1], metadata={"format": "pt"})
        return written

    def _chunks(self) -> Iterator[list[str]]:
        chunk: list[str] = []
        size = 0
        for name in self.names:
            stored = self.files.tensors[name]
            nbytes = torch.Size(stored.shape).numel() * stored.dtype.itemsize
            if chunk and size + nbytes > _FILE_SIZE:
                yield chunk
                chunk, size = [], 0
            chunk.append(name)
            size += nbytes
        yield chunk


def warn_of_unused(model: Any, stored: Iterable[str], loading: Loading, folder: Path) -> None:
    """Warn of stored tensors that the model does not use, and say what becomes of them.

    :param stored: names of the tensors in the files
    :param loading: the conversion from stored names
    """
    names = sorted(stored)
    unused = _unused(model, names, loading)
    if unused:
        more = f" and {len(unused) - _NAMED} more" if len(unused) > _NAMED else ""
        fate = "copied unchanged into" if _is_whole(model, folder) else "left out of"
        warnings.warn(
            f"{type(model).__name__} does not use {len(unused)} of {len(names)} tensors of "
            f"{model_name(model)}: {', '.join(unused[:_NAMED])}{more}. They are {fate} a "
            "checkpoint",
            stacklevel=3,
        )


def _unused(model: Any, stored: Iterable[str], loading: Loading) -> list[str]:
    names = sorted(stored)
    used = {name for own in loading.sources(model, names).values() for name in own}
    return [name for name in names if name not in used and not _COMPUTED.search(name)]


def _is_whole(model: Any, folder: Path) -> bool:
    """Return whether a model has all layers, and the head, that the config of a folder describes.

    What another class, or a shorter model, does not use was left out by intent.
    """
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    classes: Sequence[str] = config.get("architectures") or ()
    depth = config.get("num_hidden_layers")
    return type(model).__name__ in classes and depth in (
        None,
        getattr(model.config, "num_hidden_layers", None),
    )


def _block_of(name: str) -> str:
    """Return the layer that a tensor belongs to, such as `model.layers.61`, or its module."""
    found = re.match(r"(?:[^.]+\.)*?layers\.\d+(?=\.)", name)
    return found[0] if found else name.rpartition(".")[0]
