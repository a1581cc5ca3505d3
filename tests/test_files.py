"""Folders and files appear complete or not at all."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from inlay.errors import CheckpointError, ConfigurationError, InlayError
from inlay.files import (
    new_file,
    new_folder,
    require_room,
    require_writable,
    write_atomically,
)


def contents(folder: Path) -> dict[str, str]:
    """Return the text of every file in a folder, hidden ones included."""
    return {
        str(path.relative_to(folder)): path.read_text()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.fixture
def old(tmp_path: Path) -> Path:
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "old.txt").write_text("old")
    return folder


def test_it_appears_at_the_end(tmp_path: Path) -> None:
    with new_folder(tmp_path / "deep" / "out") as folder:
        (folder / "sub").mkdir()
        (folder / "sub" / "file").write_text("new")
        assert folder.parent == tmp_path / "deep"
        assert folder.name.startswith(".out.")
        assert folder.suffix == ".partial"
        assert not (tmp_path / "deep" / "out").exists()
    assert contents(tmp_path) == {"deep/out/sub/file": "new"}
    assert not folder.exists()


def test_an_empty_folder_may_be_there(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with new_folder(tmp_path / "out") as folder:
        (folder / "file").write_text("new")
    assert contents(tmp_path) == {"out/file": "new"}


def test_two_at_once_do_not_meet(tmp_path: Path) -> None:
    with new_folder(tmp_path / "out") as one, new_folder(tmp_path / "out") as other:
        assert one != other


def test_a_folder_with_something_in_it_is_refused(old: Path) -> None:
    with (
        pytest.raises(ConfigurationError, match=r"out is not empty.*overwrite=True.*--overwrite"),
        new_folder(old),
    ):
        pytest.fail("nothing must be done first")
    assert contents(old.parent) == {"out/old.txt": "old"}


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_file_is_refused(tmp_path: Path, overwrite: bool) -> None:
    (tmp_path / "out").write_text("file")
    with (
        pytest.raises(ConfigurationError, match="out is a file"),
        new_folder(tmp_path / "out", overwrite=overwrite),
    ):
        pytest.fail("nothing must be done first")


def test_overwriting_replaces_the_whole(old: Path) -> None:
    with new_folder(old, overwrite=True) as folder:
        (folder / "new.txt").write_text("new")
        assert contents(old) == {"old.txt": "old"}
    assert contents(old.parent) == {"out/new.txt": "new"}


def test_a_link_keeps_pointing_at_what_is_replaced(old: Path) -> None:
    link = old.parent / "link"
    link.symlink_to(old)
    with new_folder(link, overwrite=True) as folder:
        (folder / "new.txt").write_text("new")
    assert link.is_symlink()
    assert contents(old) == {"new.txt": "new"}


def test_the_working_directory_is_never_replaced(
    old: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (old / "sub").mkdir()
    monkeypatch.chdir(old / "sub")
    with (
        pytest.raises(ConfigurationError, match="working directory"),
        new_folder(old, overwrite=True),
    ):
        pytest.fail("nothing must be done first")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("wrong"), InlayError("wrong")])
def test_an_exception_leaves_what_was_there(old: Path, error: BaseException) -> None:
    def write() -> None:
        with new_folder(old, overwrite=True) as folder:
            (folder / "half").write_text("half")
            raise error

    with pytest.raises(type(error)):
        write()
    assert contents(old.parent) == {"out/old.txt": "old"}


def test_a_full_disk_says_what_was_written_and_how_much_was_free(old: Path) -> None:
    def write() -> None:
        with new_folder(old, overwrite=True) as folder:
            (folder / "earlier").write_text("whole")
            os.utime(folder / "earlier", (0, 0))
            (folder / "weights").write_text("half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(CheckpointError) as caught:
        write()
    assert contents(old.parent) == {"out/old.txt": "old"}
    message = str(caught.value)
    assert message.startswith(f"{old} could not be written: No space left on device (writing weig")
    assert "GB were free" in message
    assert "Nothing was changed" in message
    assert caught.value.errno == errno.ENOSPC


@pytest.mark.parametrize("failing", [1, 2])
def test_the_old_folder_is_put_back(
    old: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    rename, calls = os.rename, []

    def fail(*names: Path) -> None:
        calls.append(names)
        if len(calls) == failing:
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))
        rename(*names)

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(CheckpointError, match="Permission denied"), new_folder(old, overwrite=True):
        pass
    assert contents(old.parent) == {"out/old.txt": "old"}
    assert len(list(old.parent.iterdir())) == 1


def test_everything_is_on_the_disk_before_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    rename = os.rename
    monkeypatch.setattr(
        os, "fsync", lambda number: done.append(os.readlink(f"/proc/self/fd/{number}"))
    )
    monkeypatch.setattr(os, "rename", lambda *names: (done.append("rename"), rename(*names))[1])
    with new_folder(tmp_path / "out") as folder:
        (folder / "sub").mkdir()
        (folder / "sub" / "file").write_text("new")
    inside = [str(folder / "sub" / "file"), str(folder / "sub"), str(folder)]
    assert done == [*inside, "rename", str(tmp_path)]


KILLED = """
import os, signal, sys
from inlay.files import new_folder
with new_folder(sys.argv[1], overwrite=True) as folder:
    (folder / "half").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_run_is_no_result_and_is_named_by_the_next(old: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(old)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert contents(old) == {"old.txt": "old"}
    (left,) = set(old.parent.iterdir()) - {old}
    with (
        pytest.warns(UserWarning, match=f"{left.name} is part of a result that was never finished"),
        new_folder(old, overwrite=True) as folder,
    ):
        (folder / "new.txt").write_text("new")
    assert contents(old) == {"new.txt": "new"}
    assert left.exists(), "deleting it is the user's business"


def test_what_was_moved_aside_by_a_killed_run_is_named(tmp_path: Path) -> None:
    (tmp_path / ".out.0x-1.replaced").mkdir()
    with pytest.warns(UserWarning, match="was out before a run that was stopped; rename it back"):  # noqa: SIM117
        with new_folder(tmp_path / "out"):
            pass


def test_those_who_are_still_writing_are_not_leftovers(tmp_path: Path) -> None:
    with new_folder(tmp_path / "out"), new_folder(tmp_path / "out"):
        pass


UNMAKEABLE = {"a file": "Not a directory", "no folders": "", "a long name": "File name too long"}


@pytest.fixture(params=UNMAKEABLE)
def unmakeable(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, str]:
    """A place where no folder can be made, and the reason that the system gives."""
    (tmp_path / "file").write_text("file")
    places = {
        "a file": tmp_path / "file" / "deep" / "out",
        "no folders": Path("/proc/deep/out"),  # refused to the administrator as well
        "a long name": tmp_path / ("n" * 250),
    }
    return places[request.param], UNMAKEABLE[request.param]


def test_a_folder_that_cannot_be_made_is_refused_at_once(
    unmakeable: tuple[Path, str], tmp_path: Path
) -> None:
    place, reason = unmakeable
    with pytest.raises(ConfigurationError, match=f"cannot write the folder {place}: {reason}"):
        require_room(place)
    with pytest.raises(
        ConfigurationError, match=f"cannot write the folder {place}/stat.*: {reason}"
    ):
        require_writable(place / "statistics")
    with pytest.raises(ConfigurationError, match="cannot write the folder"), new_folder(place):
        pytest.fail("nothing must be done first")
    assert contents(tmp_path) == {"file": "file"}


def test_asking_for_room_leaves_nothing_behind(tmp_path: Path) -> None:
    require_room(tmp_path / "deep" / "out")
    require_room(tmp_path / "out")
    require_writable(tmp_path)
    require_writable(tmp_path / "deep" / "statistics")
    assert list(tmp_path.iterdir()) == []


def test_a_file_whose_folder_cannot_be_made_is_named(unmakeable: tuple[Path, str]) -> None:
    place, reason = unmakeable
    with pytest.raises(CheckpointError, match=f"{place} could not be written: {reason}"):
        write_atomically(place, "new")


@pytest.mark.parametrize(
    ("code", "advice"),
    [
        (errno.ENOSPC, "make room or name another place"),
        (errno.EFBIG, r"\(ulimit -f\), or pass --max-shard-size"),
        (errno.EIO, "name another place"),
    ],
)
def test_the_advice_fits_the_failure(tmp_path: Path, code: int, advice: str) -> None:
    def write() -> None:
        with new_folder(tmp_path / "out"):
            raise OSError(code, os.strerror(code))

    with pytest.raises(CheckpointError, match=rf"Nothing was changed there; .*{advice}, and try"):
        write()


def test_a_file_inside_a_folder_fails_with_one_message(
    old: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)

    def write() -> None:
        with new_folder(old, overwrite=True) as folder:
            write_atomically(folder / "inside", "new")

    with pytest.raises(CheckpointError) as caught:
        write()
    assert str(caught.value).count("could not be written") == 1
    assert str(caught.value).startswith(f"{old} could not be written: No space left on device")


def test_another_writer_can_write_the_file(tmp_path: Path) -> None:
    """Such as that of safetensors, which writes for the owner's eyes only."""
    path = tmp_path / "deep" / "file"
    with new_file(path) as partial:
        partial.touch(mode=0o600)
        partial.write_text("new")
        assert partial.parent == path.parent
        assert not path.exists()
    assert contents(tmp_path) == {"deep/file": "new"}
    (tmp_path / "plain").touch()
    assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize("mask", [0o022, 0o027, 0o077])
def test_the_umask_holds_and_never_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mask: int
) -> None:
    """It belongs to the process: files of other threads would get the permissions."""
    old = os.umask(mask)
    changed = []
    try:
        monkeypatch.setattr(os, "umask", changed.append)
        with new_folder(tmp_path / "folder") as folder:
            write_atomically(folder / "inside", "new")
            (folder / "another").touch(mode=0o600)
    finally:
        monkeypatch.undo()
        os.umask(old)
    assert not changed
    assert contents(tmp_path) == {"folder/inside": "new", "folder/another": ""}
    modes = {file.stat().st_mode & 0o777 for file in (tmp_path / "folder").iterdir()}
    assert modes == {0o666 & ~mask}


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("wrong")])
def test_an_exception_leaves_the_old_file(tmp_path: Path, error: BaseException) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    def write() -> None:
        with new_file(path) as partial:
            partial.write_text("half")
            raise error

    with pytest.raises(type(error)):
        write()
    assert contents(tmp_path) == {"file": "old"}


@pytest.mark.parametrize("content", ["text ü", b"\x00bytes"])
def test_a_file_is_written_as_a_whole(tmp_path: Path, content: str | bytes) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    write_atomically(path, content)
    expected = content if isinstance(content, bytes) else content.encode()
    assert path.read_bytes() == expected
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_cannot_be_written_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match="file could not be written: No space left"):
        write_atomically(path, "new")
    assert contents(tmp_path) == {"file": "old"}
