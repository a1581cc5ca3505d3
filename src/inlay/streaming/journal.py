"""The journal of a streamed run: what is written already, so that it need not be done again."""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from inlay.checkpoint.shards import file_name
from inlay.collectives import from_all_ranks
from inlay.errors import CheckpointError, ConfigurationError
from inlay.files import require_writable, write_atomically
from inlay.ranks.identity import is_first

__all__ = ["Journal", "Written", "digest_of", "work_folder"]

_FILE = "journal.json"
_VERSION = 1


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
    :param identity: what has to be the same for a run to go on: model, recipe, data, settings
    :param resume: go on with what is there; without it, a folder that has something is refused
    """

    def __init__(self, out: Path, identity: Mapping[str, Any], *, resume: bool) -> None:
        self.folder = work_folder(out)
        self.checkpoint = self.folder / "checkpoint"
        self.identity = json.loads(json.dumps(identity))
        self.written: list[Written] = []
        if is_first():
            self._open(resume)
        self.written = from_all_ranks(self.written)[0]

    def _open(self, resume: bool) -> None:
        require_writable(self.folder)
        found = (self.folder / _FILE).exists()
        if found and not resume:
            raise ConfigurationError(
                f"{self.folder} holds the work of an interrupted run; continue it (resume=True, "
                "--resume), or remove the folder"
            )
        if found:
            self._restore()
        else:
            shutil.rmtree(self.folder, ignore_errors=True)  # of a run that had finished nothing
            self.checkpoint.mkdir(parents=True)
            self._save()

    def region_folder(self, number: int) -> Path:
        """Where a region keeps its statistics and qparams."""
        return self.folder / "regions" / f"{number:05d}"

    def add(self, written: Written) -> None:
        """Take note that a region is finished. From now on it is never done again."""
        self.written.append(written)
        self._save()

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def _save(self) -> None:
        content = {
            "version": _VERSION,
            "identity": self.identity,
            "written": [asdict(each) for each in self.written],
        }
        write_atomically(self.folder / _FILE, json.dumps(content, indent=1))

    def _restore(self) -> None:
        content = json.loads((self.folder / _FILE).read_text(encoding="utf-8"))
        if content.get("version") != _VERSION:
            raise ConfigurationError(
                f"{self.folder} is of another version of Inlay; resume with that one, or remove it"
            )
        known = content["identity"]
        unlike = [key for key in self.identity if known.get(key) != self.identity[key]]
        if unlike:
            raise ConfigurationError(
                f"{self.folder} was made with another {', '.join(unlike)}; resume with the same "
                "model, recipe, data and settings, or remove the folder to start anew"
            )
        for each in content["written"]:
            files = {name: (int(size), digest) for name, (size, digest) in each["files"].items()}
            self.written.append(Written(**{**each, "files": files}))
        for written in self.written:
            for name, (size, digest) in written.files.items():
                self._verify(self._find(name), size, digest, written.region)

    def _find(self, name: str) -> Path:
        """Find a file of the checkpoint, which has its last name if all of them were written."""
        names = [each for written in self.written for each in written.files]
        final = self.checkpoint / file_name(names.index(name), len(names))
        return final if final.exists() else self.checkpoint / name

    def _verify(self, file: Path, size: int, digest: str, region: str) -> None:
        if not file.exists() or file.stat().st_size != size or digest_of(file) != digest:
            raise CheckpointError(
                f"{file}, which an interrupted run had written for {region}, is missing or was "
                f"changed since; remove {self.folder} and start anew"
            )


def work_folder(out: Path) -> Path:
    """Return the folder beside `out` that holds the work of a run until it is done."""
    place = Path(os.path.realpath(out))
    return place.with_name(f"{place.name}.streaming")


def digest_of(file: Path) -> str:
    """Return a fingerprint of the content of a file."""
    found = hashlib.blake2b(digest_size=16)
    with file.open("rb") as opened:
        while chunk := opened.read(1 << 24):
            found.update(chunk)
    return found.hexdigest()
