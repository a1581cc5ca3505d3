"""Folders and files that are there as a whole, or not at all."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from inlay.errors import CheckpointError, ConfigurationError, InlayError
from inlay.files import new_folder, write_atomically


def contents(folder: Path) -> dict[str, str]:
    """Everything in a folder, what is hidden too."""
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
    rename, flush = os.rename, os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda number: done.append(os.readlink(f"/proc/self/fd/{number}"))
    )
    monkeypatch.setattr(os, "rename", lambda *names: (done.append("rename"), rename(*names))[1])
    with new_folder(tmp_path / "out") as folder:
        (folder / "sub").mkdir()
        (folder / "sub" / "file").write_text("new")
    inside = [str(folder / "sub" / "file"), str(folder / "sub"), str(folder)]
    assert done == [*inside, "rename", str(tmp_path)]
    assert flush is not os.fsync


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
