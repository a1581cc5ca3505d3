"""Statistics that the processes of a run keep in a folder while it goes on, each in its own file.

A file says which batches its statistics are of. So whoever goes on, on however many processes,
knows which batches are left, and every batch counts once:

- a process goes on from its own file; if there were other processes before, it takes the files of
  some of them and merges those,
- a file whose batches are all in another file is left over from before a merge, and does not count.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from inlay.collectives import from_all_ranks
from inlay.errors import ConfigurationError
from inlay.files import remove_work_folder
from inlay.ranks.division import Part
from inlay.statistics.data_seen import DataSeen
from inlay.statistics.on_disk import FILE_NAME, StoredStatistics

__all__ = ["KeptFiles", "file_name", "kept_files", "names_in", "remove_all", "remove_files"]

_WRITTEN = tuple(
    f"{name}{ending}"
    for name in ("statistics", "rank-*-of-*")
    for ending in (".safetensors", ".json")
)
_PARTIAL = tuple(f".{name}.*.partial" for name in _WRITTEN)  # of a killed run
_RANK_FILE = re.compile(r"rank-(\d+)-of-(\d+)\.safetensors")


def file_name(part: Part) -> str:
    """The name of the file that a process keeps its statistics in."""
    return FILE_NAME if part.size == 1 else f"rank-{part.rank}-of-{part.size}.safetensors"


@dataclass(frozen=True, kw_only=True)
class KeptFiles:
    """The files of a folder that count, and who goes on from them.

    :param seen: what data all of them are of
    :param own: names of the files that this process takes
    :param leftover: names of files that do not count
    """

    folder: Path
    seen: DataSeen
    own: tuple[str, ...]
    leftover: tuple[str, ...] = ()

    def load(self) -> StoredStatistics | None:
        """The statistics that this process goes on from; None if others take all there is."""
        found = [StoredStatistics.load(self.folder / name) for name in self.own]
        if len(found) < 2:
            return found[0] if found else None
        seen = DataSeen.of_all(stored.data_seen for stored in found)
        return replace(found[0].merge(*found[1:]), data=found[0].data, data_seen=seen)

    def remove(self, *, but: str) -> None:
        """Remove the files that this process took, and those that do not count.

        :param but: the name of the file that has taken their place
        """
        remove_files(self.folder, {*self.own, *self.leftover} - {but})


def remove_files(folder: Path, names: Iterable[str]) -> None:
    """Remove files of statistics, with what stands beside them for people."""
    for name in names:
        (folder / name).unlink(missing_ok=True)
        (folder / name).with_suffix(".json").unlink(missing_ok=True)


def remove_all(folder: Path) -> None:
    """Remove the folder of a run that is done, but for files that Inlay did not write."""
    remove_work_folder(folder, *_WRITTEN, *_PARTIAL)


def kept_files(folder: Path, part: Part) -> KeptFiles:
    """Find the files of a folder, and agree with all processes on who takes which.

    Not every process need see the same folder: on several machines each may have its own.
    """
    names = names_in(folder)
    of_ranks = from_all_ranks(
        {name: StoredStatistics.data_seen_in(folder / name) for name in names}
    )
    seen = {name: known for of_rank in of_ranks for name, known in of_rank.items()}
    counting = _counting(seen, folder)
    takers: dict[str, int] = {}
    for place, name in enumerate(counting):
        seers = [rank for rank, of_rank in enumerate(of_ranks) if name in of_rank]
        takers[name] = _taker(name, seers, place, part.size)
    return KeptFiles(
        folder=folder,
        seen=DataSeen.of_all(seen[name] for name in counting),
        own=tuple(name for name, rank in takers.items() if rank == part.rank),
        leftover=tuple(name for name in names if name not in counting),
    )


def names_in(folder: Path) -> list[str]:
    """Return the names of files that processes keep statistics in."""
    found = sorted(path.name for path in folder.glob("*.safetensors"))
    return [name for name in found if name == FILE_NAME or _RANK_FILE.fullmatch(name)]


def _taker(name: str, seers: Sequence[int], place: int, size: int) -> int:
    """The process that wrote a file, if there are as many as then; else they take turns."""
    written = _RANK_FILE.fullmatch(name)
    if written is not None and int(written[2]) == size and int(written[1]) in seers:
        return int(written[1])
    return seers[place % len(seers)]


def _counting(seen: Mapping[str, DataSeen], folder: Path) -> list[str]:
    """Leave out files whose batches are all in another one."""
    batches = {name: set(known.fingerprints) for name, known in seen.items()}
    unknown = [name for name, known in seen.items() if known.is_unknown]
    if unknown:
        raise ConfigurationError(
            f"{folder} does not say which batches its statistics are of, as those of a checkpoint "
            "and merged ones do not; start anew with another folder, and merge the two "
            "(StoredStatistics.merge, inlay merge)"
        )
    chosen: list[str] = []
    for name in sorted(seen, key=lambda name: (-len(batches[name]), name)):
        over = [other for other in chosen if batches[name] & batches[other]]
        if not over and (batches[name] or not chosen):
            chosen.append(name)
        elif any(not batches[name] <= batches[other] for other in over):
            raise ConfigurationError(
                f"{name} and {over[0]} in {folder} hold statistics of the same batches, so they "
                "are not of one run; remove those of the wrong one, or start anew"
            )
    return sorted(chosen)
