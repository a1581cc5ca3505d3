"""What a finished region leaves in the work folder for the end of the run, or for a resumed one."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from inlay.errors import CheckpointError
from inlay.files import new_file, write_atomically
from inlay.observers import QParamsDict
from inlay.report.data import LayerError, SlotRecord
from inlay.report.plain import from_plain, to_plain
from inlay.statistics.on_disk import FILE_NAME, StoredStatistics
from inlay.steps.weights import Compensation

__all__ = ["Kept", "Shown", "merged", "save_qparams"]

_QPARAMS, _SHOWN, _WEIGHTS = "qparams.safetensors", "shown.json", "weights.safetensors"

_K = TypeVar("_K")
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Shown:
    """What a report shows of a region.

    :param unequalized: why the inputs of modules are not equalized, by module
    """

    slots: tuple[SlotRecord, ...]
    layers: tuple[LayerError, ...]
    unequalized: dict[str, str]
    compensations: dict[str, Compensation]

    @classmethod
    def of_all(cls, of_ranks: Sequence["Shown"]) -> "Shown":
        """Join what all ranks show of a region."""
        return cls(
            slots=tuple(slot for own in of_ranks for slot in own.slots),
            layers=tuple(layer for own in of_ranks for layer in own.layers),
            unequalized=merged(own.unequalized for own in of_ranks),
            compensations=merged(own.compensations for own in of_ranks),
        )


class Kept:
    """The folder of a region: its statistics and qparams, and what a report shows of it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def save(
        self,
        *,
        qparams: Mapping[str, QParamsDict],
        statistics: StoredStatistics,
        compensated: Mapping[str, torch.Tensor],
        shown: Sequence[Shown],
    ) -> None:
        """Save everything.

        :param compensated: weights for the comparison, which runs the blocks again
        :param shown: of all ranks; none if there will be no report
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        save_qparams(qparams, self._folder / _QPARAMS)
        statistics.save(self._folder)
        if shown:
            text = json.dumps(to_plain(Shown.of_all(shown)))
            write_atomically(self._folder / _SHOWN, text)
        if compensated:
            tensors = {name: tensor.cpu().contiguous() for name, tensor in compensated.items()}
            with new_file(self._folder / _WEIGHTS) as partial:
                save_file(tensors, partial)

    def statistics(self) -> StoredStatistics:
        return StoredStatistics.load(self._folder)

    def fingerprints(self) -> dict[str, str]:
        """The fingerprints of the weights that the region has written."""
        return StoredStatistics.weights_in(self._folder / FILE_NAME)

    def shown(self) -> Shown:
        file = self._folder / _SHOWN
        return from_plain(Shown, json.loads(file.read_text(encoding="utf-8")), file.name)

    def qparams(self, device: torch.device) -> dict[str, QParamsDict]:
        """Read the qparams; on a CPU they stay in the file until they are used."""
        tensors, metadata = _read(self._folder / _QPARAMS, device)
        found: dict[str, Any] = {name: {} for name in json.loads(metadata["slots"])}
        for name, tensor in tensors.items():
            slot, _, key = name.rpartition("/")
            found[slot][key] = tensor
        return found

    def compensated(self, device: torch.device) -> dict[str, torch.Tensor]:
        """Read the compensated weights, if there are any, as `qparams` does."""
        file = self._folder / _WEIGHTS
        return _read(file, device)[0] if file.exists() else {}


def merged(parts: Iterable[Mapping[_K, _T]]) -> dict[_K, _T]:
    """Return one dictionary of all."""
    return {name: value for part in parts for name, value in part.items()}


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


def _read(file: Path, device: torch.device) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    try:
        with safe_open(file, framework="pt") as opened:
            tensors = {name: opened.get_tensor(name).to(device) for name in opened.keys()}  # noqa: SIM118
            return tensors, opened.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{file}, which an interrupted run had written, cannot be read: {error}; remove the "
            "folder and start anew"
        ) from error
