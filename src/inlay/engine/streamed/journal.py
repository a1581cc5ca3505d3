"""The journal of a streamed run: what is written already, so that it need not be done again."""

import json
import os
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from inlay.checkpoint.shards import file_name
from inlay.checkpoint.shared_shard import digest_of
from inlay.collectives import from_all_ranks
from inlay.engine.resuming import JOURNAL, nothing_to_resume
from inlay.engine.streamed.kept import Kept
from inlay.errors import CheckpointError, ConfigurationError
from inlay.files import (
    remove_partial_files,
    remove_work_folder,
    remove_written,
    require_writable,
    write_atomically,
)
from inlay.fingerprints import difference
from inlay.ranks.division import Part
from inlay.ranks.identity import is_first

__all__ = ["Journal", "Written", "require_journal", "work_folder"]

_VERSION = 3
_VALUES = ("before-*/*.safetensors", "lasting/*.safetensors", "lasting/*.partial")
# What a run leaves in its folder, where the checkpoint is no longer when it is done.
_WRITTEN = (
    JOURNAL,
    ".journal.json.*.partial",
    "checkpoint/.*.partial",
    *(
        f"regions/*/{name}"
        for name in ("qparams.safetensors", "weights.safetensors", "statistics.*", "shown.json")
    ),
    "regions/*/.*.partial",
    *(f"{place}/{name}" for place in ("activations", "comparing/*") for name in _VALUES),
)


@dataclass(frozen=True, kw_only=True)
class Written:
    """What a finished region left on disk.

    :param region: its name
    :param files: files of the checkpoint, with their size and digest
    :param values: checksums of the values that batches have after it
    """

    region: str
    files: Mapping[str, tuple[int, str]]
    values: Mapping[str, int] = field(default_factory=dict)


class Journal:
    """The folder in which a streamed run works, beside the one that it will write.

    Over ranks, the first one keeps the journal, and the others know what it held at the start.

    :param out: the folder that the run will write
    :param identity: model, recipe, data and settings, which must not change between runs
    :param resume: go on with what is there; without it, a folder that has something is refused
    :param decision: how batches run if no interrupted run has decided, as values that JSON keeps
    """

    def __init__(
        self,
        out: Path,
        identity: Mapping[str, Any],
        *,
        resume: bool,
        decision: Mapping[str, Any] | None = None,
    ) -> None:
        self.folder = work_folder(out)
        self.checkpoint = self.folder / "checkpoint"
        self.identity = json.loads(json.dumps(identity))
        self.decision = decision
        self.written: list[Written] = []
        if is_first():
            self._open(resume)
        own = self.written, self.decision, uuid.uuid4().hex[:8]
        self.written, self.decision, self.writer = from_all_ranks(own)[0]
        self._verify()

    def _open(self, resume: bool) -> None:
        require_writable(self.folder)
        found = (self.folder / JOURNAL).exists()
        if found and not resume:
            raise ConfigurationError(
                f"{self.folder} holds the work of an interrupted run; continue it (resume=True, "
                "--resume), or remove the folder"
            )
        if found:
            self._restore()
            remove_partial_files(self.folder)
        else:
            self._remove_leftovers()
            self.checkpoint.mkdir(parents=True, exist_ok=True)
            self._save()

    def kept(self, number: int) -> Kept:
        """What a region keeps: its statistics and qparams."""
        return Kept(self.folder / "regions" / f"{number:05d}")

    def add(self, written: Written) -> None:
        """Take note that a region is finished. From now on it is never done again."""
        self.written.append(written)
        self._save()

    def remove(self) -> None:
        """Remove the files of this run, and leave all others."""
        remove_work_folder(self.folder, *_WRITTEN)

    def _remove_leftovers(self) -> None:
        """Remove files of a run that was killed before it wrote its journal, or at its end.

        :raises ConfigurationError: if there are files that would become part of the checkpoint
        """
        remove_written(self.folder, *_WRITTEN)  # the end of the run names what stays
        if self.checkpoint.exists() and any(self.checkpoint.iterdir()):
            raise ConfigurationError(
                f"{self.checkpoint} holds files of an unknown run; remove or rename it"
            )

    def _save(self) -> None:
        content = {
            "version": _VERSION,
            "identity": self.identity,
            "decision": self.decision,
            "written": [asdict(each) for each in self.written],
        }
        write_atomically(self.folder / JOURNAL, json.dumps(content, indent=1))

    def _restore(self) -> None:
        content = json.loads((self.folder / JOURNAL).read_text(encoding="utf-8"))
        if content.get("version") != _VERSION:
            raise ConfigurationError(
                f"{self.folder} is of another version of Inlay; resume with that one, or remove it"
            )
        known = content["identity"]
        unlike = [key for key in self.identity if known.get(key) != self.identity[key]]
        if unlike:
            weights = difference(known["weights"], self.identity["weights"])
            named = [f"weights ({weights})" if each == "weights" else each for each in unlike]
            raise ConfigurationError(
                f"{self.folder} was made with another {', '.join(named)}; resume with the same "
                "model, recipe, data and settings, or remove the folder to start anew"
            )
        self.decision = content.get("decision", self.decision)
        for each in content["written"]:
            files = {name: (int(size), digest) for name, (size, digest) in each["files"].items()}
            self.written.append(Written(**{**each, "files": files}))

    def _verify(self) -> None:
        """Verify the files that are there, a part of them on each rank."""
        files = [(each.region, *file) for each in self.written for file in each.files.items()]
        for place, (region, name, (size, digest)) in enumerate(files):
            if Part.own().takes(place) and not _is_unchanged(self._find(name), size, digest):
                raise CheckpointError(
                    f"{self._find(name)}, which an interrupted run had written for {region}, is "
                    f"missing or was changed since; remove {self.folder} and start anew"
                )

    def _find(self, name: str) -> Path:
        """Find a file of the checkpoint, which has its last name if all of them were written."""
        names = [each for written in self.written for each in written.files]
        final = self.checkpoint / file_name(names.index(name), len(names))
        return final if final.exists() else self.checkpoint / name


def require_journal(out: Path) -> None:
    """Refuse to resume a run that has left no journal."""
    if not (work_folder(out) / JOURNAL).exists():
        raise nothing_to_resume(work_folder(out))


def work_folder(out: Path) -> Path:
    """Return the folder beside `out` that holds the work of a run until it is done."""
    place = Path(os.path.realpath(out))
    return place.with_name(f"{place.name}.streaming")


def _is_unchanged(file: Path, size: int, digest: str) -> bool:
    try:
        return file.stat().st_size == size and digest_of(file) == digest
    except (FileNotFoundError, ValueError, LookupError, TypeError):  # of a header that was changed
        return False
