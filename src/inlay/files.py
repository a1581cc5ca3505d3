"""Files and folders that are there as a whole, or not at all."""

import contextlib
import os
import shutil
import uuid
import warnings
from collections.abc import Iterator
from pathlib import Path

from inlay.errors import CheckpointError, ConfigurationError

__all__ = ["new_folder", "write_atomically", "written_atomically"]

_PARTIAL = ".partial"  # something being written
_REPLACED = ".replaced"  # what was there before, until the new is in its place


@contextlib.contextmanager
def new_folder(path: str | Path, *, overwrite: bool = False) -> Iterator[Path]:
    """A folder to write into, that becomes `path` if all goes well and is removed otherwise.

    Until then it is a hidden sibling of `path`, so that the last step is a rename.

    :param path: where the folder will be; it may be there already if it is empty
    :param overwrite: replace a folder that is not empty, once the new one is complete
    """
    target = Path(os.path.realpath(path))
    _require_room(target, overwrite)
    _warn_of_leftovers(target)
    partial = _sibling(target, _PARTIAL)
    try:
        partial.mkdir(parents=True)
        yield partial
        _flush_tree(partial)
        _move_in(partial, target)
    except OSError as error:
        raise _unwritten(target, partial, error) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_atomically(path: str | Path, content: str | bytes) -> None:
    """Write a file. Whoever reads it sees the old content or the new, never a part."""
    with written_atomically(path) as partial:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def written_atomically(path: str | Path) -> Iterator[Path]:
    """Give the name of a file to write, and rename it to `path` if all goes well."""
    target = Path(os.path.realpath(path))
    partial = _sibling(target, _PARTIAL)
    try:
        yield partial
        _flush(partial)
        os.replace(partial, target)
        _flush(target.parent)
    except OSError as error:
        raise _unwritten(target, partial, error) from error
    finally:
        partial.unlink(missing_ok=True)


def _require_room(target: Path, overwrite: bool) -> None:
    if target.exists() and not target.is_dir():
        raise ConfigurationError(f"{target} is a file; name a folder to write into")
    if not target.is_dir() or not any(target.iterdir()):
        return
    if not overwrite:
        raise ConfigurationError(
            f"{target} is not empty. Name another folder, or replace it with overwrite=True "
            "(--overwrite)"
        )
    here = [Path.cwd(), Path.home()]
    if any(target == place or target in place.parents for place in here):
        raise ConfigurationError(
            f"{target} holds the working directory or your home; it is not replaced, with "
            "overwrite neither. Name another folder"
        )


def _sibling(target: Path, ending: str) -> Path:
    """A hidden name beside `target` that no other process and no other call takes."""
    return target.parent / f".{target.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}{ending}"


def _warn_of_leftovers(target: Path) -> None:
    """Name what a killed run has left behind."""
    meanings = {
        _PARTIAL: "is part of a result that was never finished; delete it",
        _REPLACED: f"was {target.name} before a run that was stopped; rename it back or delete it",
    }
    for ending, meaning in meanings.items():
        for leftover in sorted(target.parent.glob(f".{target.name}.*-*{ending}")):
            if not _is_running(leftover.name.removeprefix(f".{target.name}.").partition("-")[0]):
                warnings.warn(f"{leftover} {meaning}", stacklevel=4)


def _is_running(process: str) -> bool:
    try:
        os.kill(int(process), 0)
    except (ProcessLookupError, ValueError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def _unwritten(target: Path, partial: Path, error: OSError) -> CheckpointError:
    """The error for a user: what was being written, why it failed, how much room there was."""
    reason = error.strerror or str(error)
    what = error.filename or _newest_file(partial)
    if what is not None and error.strerror:
        reason = f"{reason} (writing {Path(os.fsdecode(what)).name})"
    report = CheckpointError(
        f"{target} could not be written: {reason}. {_free_space(target)}Nothing was changed there; "
        "make room or name another place, and try again"
    )
    report.errno = error.errno
    return report


def _newest_file(folder: Path) -> Path | None:
    """What a failed write belongs to: the error itself does not know."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return max(files, key=lambda path: path.stat().st_mtime_ns, default=None)


def _free_space(target: Path) -> str:
    place = target
    while not place.exists():
        place = place.parent
    try:
        free = shutil.disk_usage(place).free
    except OSError:
        return ""
    return f"{free / 1e9:.2f} GB were free. "


def _move_in(partial: Path, target: Path) -> None:
    """Put the new folder in its place. The old one goes only when the new one is there."""
    if not target.exists():
        os.rename(partial, target)
        _flush(target.parent)
        return
    replaced = _sibling(target, _REPLACED)
    os.rename(target, replaced)
    try:
        os.rename(partial, target)
    except BaseException:
        os.rename(replaced, target)
        raise
    _flush(target.parent)
    shutil.rmtree(replaced, ignore_errors=True)
    if replaced.exists():
        warnings.warn(f"{replaced}, which was replaced, could not be deleted", stacklevel=4)


def _flush_tree(folder: Path) -> None:
    """Have everything on the disk before the rename, which may otherwise get there first."""
    mask = os.umask(0)
    os.umask(mask)
    for root, _, names in os.walk(folder, topdown=False):
        for name in names:
            # Some libraries write for the owner's eyes only; a checkpoint is there to be served.
            (Path(root) / name).chmod(0o666 & ~mask)
            _flush(Path(root) / name)
        _flush(Path(root))


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
