"""Files and folders that appear complete or not at all."""

import contextlib
import errno
import fnmatch
import os
import shutil
import stat
import uuid
import warnings
from collections.abc import Iterator
from pathlib import Path

from inlay.errors import CheckpointError, ConfigurationError

__all__ = [
    "complete_file",
    "move_into_place",
    "naming_failures",
    "new_file",
    "new_folder",
    "partial_name",
    "remove_partial_files",
    "remove_work_folder",
    "remove_written",
    "require_room",
    "require_writable",
    "write_atomically",
]

_PARTIAL = ".partial"  # ends the name of something that is still being written
_ROOM = "make room or name another place"
_REMEDIES = {
    errno.ENOSPC: _ROOM,
    errno.EDQUOT: _ROOM,
    errno.EFBIG: "raise the limit of the size of files (ulimit -f), or pass --max-shard-size",
}
_REPLACED = ".replaced"  # ends the name of an old folder until the new one is in its place


@contextlib.contextmanager
def new_folder(path: str | Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield a folder to write into; rename it to `path` on success, remove it on failure.

    Until then the folder is a hidden sibling of `path`, so that the last step is a rename.

    :param path: where the folder will be; an empty folder may be there already
    :param overwrite: replace a folder that is not empty, once the new one is complete
    """
    target = Path(os.path.realpath(path))
    require_room(target, overwrite=overwrite)
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


def move_into_place(folder: Path, path: str | Path, *, overwrite: bool = False) -> None:
    """Rename a complete folder to `path`, as `new_folder` does at its end.

    :param folder: a folder on the same file system
    """
    target = Path(os.path.realpath(path))
    require_room(target, overwrite=overwrite)
    try:
        _flush_tree(folder)
        _move_in(folder, target)
    except OSError as error:
        raise _unwritten(target, folder, error) from error


@contextlib.contextmanager
def new_file(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path to write to; rename it to `path` on success, remove it on failure.

    A reader of `path` sees the old content or the new, never a part. Missing parent folders are
    made.
    """
    target = Path(os.path.realpath(path))
    partial = _sibling(target, _PARTIAL)
    try:
        with naming_failures(target, partial):
            target.parent.mkdir(parents=True, exist_ok=True)
            yield partial
            partial.chmod(_usual_mode(target.parent))
            complete_file(partial, target)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()


def partial_name(path: Path, writer: str) -> Path:
    """Return the hidden name that a file has while it is written.

    :param writer: tells apart who writes it
    """
    return path.with_name(f".{path.name}.{writer}{_PARTIAL}")


def complete_file(partial: Path, path: Path) -> None:
    """Give a file that is completely written its name, and have all of that on the disk."""
    _flush(partial)
    os.replace(partial, path)
    _flush(path.parent)


def remove_partial_files(folder: Path) -> None:
    """Remove what killed processes were writing, in a folder that nobody is writing into."""
    for leftover in folder.rglob(f".*{_PARTIAL}"):
        leftover.unlink()


def remove_work_folder(folder: Path, *patterns: str) -> None:
    """Remove a folder that a run has worked in, as `remove_written` does.

    Warn of files that stay because somebody else put them there.
    """
    left = remove_written(folder, *patterns)
    if left:
        more = f" and {len(left) - 3} more" if len(left) > 3 else ""
        warnings.warn(
            f"{folder} is left in place: it holds {', '.join(left[:3])}{more}, which Inlay did not "
            "write",
            stacklevel=3,
        )


def remove_written(folder: Path, *patterns: str) -> list[str]:
    """Remove the files of a folder that match patterns, and all folders that are empty then.

    :param patterns: of paths in the folder, as `fnmatch` takes them
    :return: paths in the folder that stay
    """
    left = []
    for root, folders, names in os.walk(folder, topdown=False):
        place = Path(root)
        links = [name for name in folders if (place / name).is_symlink()]
        for path in (place / name for name in (*names, *links)):
            inside = path.relative_to(folder).as_posix()
            if any(fnmatch.fnmatchcase(inside, pattern) for pattern in patterns):
                with contextlib.suppress(OSError):
                    path.unlink()
            else:
                left.append(inside)
        with contextlib.suppress(OSError):
            place.rmdir()
    return sorted(left)


@contextlib.contextmanager
def naming_failures(path: Path, partial: Path) -> Iterator[None]:
    """Raise failures to write as errors that name the file, the reason, and the free space."""
    try:
        yield
    except OSError as error:
        raise _unwritten(path, partial, error) from error


def write_atomically(path: str | Path, content: str | bytes) -> None:
    """Write a file as `new_file` does, from content that is in memory."""
    with new_file(path) as partial:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)


def require_room(path: str | Path, *, overwrite: bool = False) -> None:
    """Refuse a path where `new_folder` could not put a folder.

    A command calls this first, because hours of work may lie before the folder is written.
    """
    target = Path(os.path.realpath(path))
    with _refusing(target):
        _require_free(target, overwrite)
        _try_beside(target)


def require_writable(folder: str | Path) -> None:
    """Refuse a folder that cannot be written into, or cannot be made if it is missing."""
    target = Path(os.path.realpath(folder))
    with _refusing(target):
        _try_beside(target / "file")


@contextlib.contextmanager
def _refusing(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigurationError(
            f"cannot write the folder {target}: {error.strerror or error}. Name another place, or "
            "change what is in the way"
        ) from error


def _require_free(target: Path, overwrite: bool) -> None:
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
            f"{target} holds the working directory or your home; it is never replaced, even with "
            "overwrite=True. Name another folder"
        )


def _try_beside(target: Path) -> None:
    """Make and remove a folder where `target` will be: permission bits alone do not tell."""
    first_missing = target
    while not first_missing.parent.exists():
        first_missing = first_missing.parent
    trial = _sibling(first_missing, _PARTIAL)
    trial.mkdir()
    trial.rmdir()


def _sibling(target: Path, ending: str) -> Path:
    """Return a hidden name beside `target` that no other process and no other call uses."""
    return target.parent / f".{target.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}{ending}"


def _warn_of_leftovers(target: Path) -> None:
    """Name the hidden folders that a killed run left behind."""
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
    """Return an error that names the file being written, the reason, and the free space."""
    if isinstance(error, CheckpointError) and isinstance(error.__cause__, OSError):
        error = error.__cause__  # a file inside the folder has already failed with its own message
    reason = error.strerror or str(error)
    file = error.filename or _newest_file(partial)
    if file is not None and error.strerror:
        reason = f"{reason} (writing {Path(os.fsdecode(file)).name})"
    report = CheckpointError(
        f"{target} could not be written: {reason}. {_free_space(target)}Nothing was changed there; "
        f"{_REMEDIES.get(error.errno or 0, 'name another place')}, and try again"
    )
    report.errno = error.errno
    return report


def _newest_file(folder: Path) -> Path | None:
    """Return the file that a failed write belongs to, when the error does not name it."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return max(files, key=lambda path: path.stat().st_mtime_ns, default=None)


def _free_space(target: Path) -> str:
    place = target
    try:
        while not place.exists():
            place = place.parent
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
        warnings.warn(f"the replaced folder could not be deleted: {replaced}", stacklevel=4)


def _flush_tree(folder: Path) -> None:
    """Write everything to the disk before the rename, which might otherwise get there first."""
    mode = _usual_mode(folder)
    for root, _, names in os.walk(folder, topdown=False):
        for name in names:
            (Path(root) / name).chmod(mode)
            _flush(Path(root) / name)
        _flush(Path(root))


def _usual_mode(folder: Path) -> int:
    """Return the permissions of a new file in a folder: some libraries write for the owner only.

    An empty file shows them. Reading the umask would mean setting it, for all threads.
    """
    trial = _sibling(folder / "mode", _PARTIAL)
    descriptor = os.open(trial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
    try:
        return stat.S_IMODE(os.fstat(descriptor).st_mode)
    finally:
        os.close(descriptor)
        trial.unlink()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
