"""Refuse to resume where there is no run, and name the folders beside it that hold one."""

from pathlib import Path

from inlay.errors import ConfigurationError
from inlay.statistics.on_disk import StoredStatistics
from inlay.statistics.rank_files import names_in

__all__ = ["JOURNAL", "nothing_to_resume"]

JOURNAL = "journal.json"  # of a streamed run, in its work folder


def nothing_to_resume(folder: Path) -> ConfigurationError:
    """Return the error for a folder that holds no run.

    A typo in its name would otherwise start a new run, and leave the interrupted one behind.
    """
    others = [path.name for path in _siblings(folder) if _holds_run(path)]
    advice = f"; {folder.parent} holds runs in {', '.join(others)}" if others else ""
    return ConfigurationError(
        f"there is no run to resume in {folder}{advice}. Name the folder of the interrupted run "
        "(--out without .statistics or .streaming), or leave resume=True (--resume) out"
    )


def _siblings(folder: Path) -> list[Path]:
    try:
        found = sorted(path for path in folder.parent.iterdir() if path.is_dir())
    except OSError:
        return []
    return [path for path in found if path.name != folder.name]


def _holds_run(folder: Path) -> bool:
    try:
        if (folder / JOURNAL).exists():
            return folder.name.endswith(".streaming")
        seen = [StoredStatistics.data_seen_in(folder / name) for name in names_in(folder)]
    except (OSError, ConfigurationError):
        return False  # nobody may read it, or it is something else
    return any(not each.is_unknown for each in seen)
