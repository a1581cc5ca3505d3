"""Tensors into files of a limited size."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from inlay.checkpoint.shards import Shards, complete, name_files, size_in_bytes
from inlay.errors import ConfigurationError


def written(folder: Path, limit: int, *added: dict[str, torch.Tensor]) -> list[Path]:
    """Write tensors that are added one dictionary after another; return the files."""
    files = Shards(folder, 0, limit, writer="test")
    for tensors in added:
        files.add(tensors, {name: place for place, name in enumerate(tensors)})
    found = files.close()
    complete(found)
    name_files(folder, [each.path.name for each in found], parameters=7)
    return sorted(folder.glob("*.safetensors"))


@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=12),
    limit=st.integers(1, 100),
    cuts=st.lists(st.integers(0, 12), max_size=3),
)
def test_every_tensor_is_in_one_file_that_is_not_too_large(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], limit: int, cuts: list[int]
) -> None:
    """Files are filled in the order of tensors, however many are added at once."""
    folder = tmp_path_factory.mktemp("shards")
    tensors = {f"t{index}": torch.arange(size) for index, size in enumerate(sizes)}
    places = [0, *sorted(cuts), len(sizes)]
    added = [dict(list(tensors.items())[a:b]) for a, b in pairwise(places)]
    files = written(folder, limit, *added)

    found = {path.name: load_file(path) for path in files}
    assert sum(map(len, found.values())) == len(tensors)
    merged = {name: tensor for file in found.values() for name, tensor in file.items()}
    assert all(torch.equal(merged[name], tensor) for name, tensor in tensors.items())
    for file in found.values():
        assert len(file) == 1 or sum(t.nbytes for t in file.values()) <= limit
    own = [sorted(int(name[1:]) for name in file) for file in found.values()]
    assert [number for numbers in own for number in numbers] == list(range(len(sizes)))
    for numbers, following in pairwise(own):  # greedily
        assert sum(tensors[f"t{n}"].nbytes for n in [*numbers, following[0]]) > limit
    if len(files) == 1:
        assert [path.name for path in folder.iterdir()] == ["model.safetensors"]
        return
    count = len(files)
    assert list(found) == [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {name: file for file in found for name in found[file]}
    assert index["metadata"] == {"total_parameters": 7, "total_size": 8 * sum(sizes)}


def test_files_are_marked_for_torch(tmp_path: Path) -> None:
    (path,) = written(tmp_path, 1, {"x": torch.ones(2)})
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_one_tensor_under_two_names_is_written_twice(tmp_path: Path) -> None:
    shared = torch.ones(3)
    (path,) = written(tmp_path, 1000, {"x": shared, "y": shared})
    found = load_file(path)
    assert torch.equal(found["x"], found["y"])


@pytest.mark.parametrize("limit", [1, 1000])
def test_two_tensors_of_one_name_are_refused(tmp_path: Path, limit: int) -> None:
    with pytest.raises(ConfigurationError, match="would be saved as x"):
        written(tmp_path, limit, {"x": torch.ones(3), "y": torch.ones(3)}, {"x": torch.ones(3)})


@pytest.mark.parametrize(
    ("text", "size"),
    [("5GB", 5 * 10**9), ("500 mb", 5 * 10**8), ("1.5KiB", 1536), (17, 17), ("17", 17)],
)
def test_sizes(text: str | int, size: int) -> None:
    assert size_in_bytes(text) == size


@pytest.mark.parametrize("text", ["five", "5XB", "-1GB", "0", "", "GB"])
def test_what_is_not_a_size(text: str) -> None:
    with pytest.raises(ConfigurationError, match="is not a size"):
        size_in_bytes(text)
