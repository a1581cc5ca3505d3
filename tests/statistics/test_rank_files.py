"""Files of ranks in a folder: whoever goes on, every batch counts once."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from inlay import Recipe
from inlay.errors import ConfigurationError
from inlay.ranks.division import Part
from inlay.statistics import rank_files
from inlay.statistics.data_seen import DataSeen
from inlay.statistics.on_disk import StoredStatistics
from inlay.statistics.rank_files import file_name, kept_files, remove_all

RECIPE = Recipe.from_preset("W8A8_STATIC").fields


def keep(folder: Path, part: Part, batches: set[int], file: str | None = None) -> None:
    prints = {number: f"{number:x}" for number in batches}
    seen = DataSeen(batches=len(batches), fingerprints=prints)
    stored = StoredStatistics(recipe=RECIPE, slots={}, data_seen=seen)
    stored.save(folder, file_name=file or file_name(part))


def taken(folder: Path, size: int, monkeypatch: pytest.MonkeyPatch) -> list[rank_files.KeptFiles]:
    """What each of several processes finds in one folder."""
    with monkeypatch.context() as patch:
        patch.setattr(rank_files, "from_all_ranks", lambda found: [found] * size)
        return [kept_files(folder, Part(rank, size)) for rank in range(size)]


@pytest.mark.parametrize("before", [1, 2, 4])
@pytest.mark.parametrize("after", [1, 2, 3, 4])
def test_each_file_has_one_taker(tmp_path: Path, monkeypatch, before: int, after: int) -> None:
    for rank in range(before):
        keep(tmp_path, Part(rank, before), set(range(rank, 10, before)))
    found = taken(tmp_path, after, monkeypatch)
    names = [name for kept in found for name in kept.own]
    assert sorted(names) == sorted(file_name(Part(rank, before)) for rank in range(before))
    assert {tuple(sorted(kept.seen.fingerprints)) for kept in found} == {tuple(range(10))}
    if before == after:
        assert names == [file_name(Part(rank, before)) for rank in range(before)]


def test_files_from_before_a_merge_do_not_count(tmp_path: Path, monkeypatch) -> None:
    """Two of four files were merged into one of two when the run was killed."""
    for rank in range(4):
        keep(tmp_path, Part(rank, 4), {rank, rank + 4})
    keep(tmp_path, Part(0, 2), {0, 2, 4, 6, 8})
    found = taken(tmp_path, 2, monkeypatch)
    assert "rank-0-of-2.safetensors" in found[0].own
    assert found[0].leftover == ("rank-0-of-4.safetensors", "rank-2-of-4.safetensors")
    assert [sorted(kept.seen.fingerprints) for kept in found] == [[0, 1, 2, 3, 4, 5, 6, 7, 8]] * 2
    assert sorted(name for kept in found for name in kept.own)[1:] == [
        "rank-1-of-4.safetensors",
        "rank-3-of-4.safetensors",
    ]
    found[0].remove(but="rank-0-of-2.safetensors")
    assert not list(tmp_path.glob("rank-[02]-of-4.*"))


def test_files_of_two_runs_are_refused(tmp_path: Path, monkeypatch) -> None:
    keep(tmp_path, Part(0, 2), {0, 1, 2})
    keep(tmp_path, Part(1, 2), {2, 3})
    with pytest.raises(ConfigurationError, match="hold statistics of the same batches"):
        taken(tmp_path, 2, monkeypatch)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.data())
def test_any_disjoint_files_are_all_taken(owners: list[int], data: st.DataObject) -> None:
    seen = {
        f"rank-{rank}-of-4.safetensors": {n for n, owner in enumerate(owners) if owner == rank}
        for rank in range(4)
    }
    order = data.draw(st.permutations(sorted(seen)))
    known = {
        name: DataSeen(batches=len(seen[name]), fingerprints=dict.fromkeys(seen[name], "x"))
        for name in order
    }
    counting = rank_files._counting(known, Path("folder"))
    assert sorted(n for name in counting for n in seen[name]) == list(range(len(owners)))


def test_what_is_not_of_a_run_is_left_alone(tmp_path: Path, monkeypatch) -> None:
    torch.save({}, tmp_path / "other.safetensors")
    assert taken(tmp_path, 1, monkeypatch)[0].own == ()
    for part in (Part(0, 1), Part(1, 2)):
        keep(tmp_path, part, {1})
    (tmp_path / ".statistics.json.12-ab.partial").touch()
    with pytest.warns(UserWarning, match=r"holds other\.safetensors, which Inlay did not write"):
        remove_all(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["other.safetensors"]
    (tmp_path / "other.safetensors").unlink()
    keep(tmp_path, Part(0, 1), {1})
    remove_all(tmp_path)
    assert not tmp_path.exists()
