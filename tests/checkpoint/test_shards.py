"""Tensors into files of a limited size."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from inlay.checkpoint.shards import Shards, size_in_bytes
from inlay.errors import ConfigurationError


@given(sizes=st.lists(st.integers(0, 40), max_size=12), limit=st.integers(1, 100))
def test_every_tensor_is_in_one_file_that_is_not_too_large(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], limit: int
) -> None:
    folder = tmp_path_factory.mktemp("shards")
    tensors = {f"t{index}": torch.arange(size) for index, size in enumerate(sizes)}
    shards = Shards(folder, limit)
    for name, tensor in tensors.items():
        shards.add({name: tensor})
    shards.close(parameters=7)

    files = sorted(folder.glob("*.safetensors"))
    found = {path.name: load_file(path) for path in files}
    assert sum(map(len, found.values())) == len(tensors)
    merged = {name: tensor for file in found.values() for name, tensor in file.items()}
    assert all(torch.equal(merged[name], tensor) for name, tensor in tensors.items())
    for file in found.values():
        assert len(file) == 1 or sum(t.nbytes for t in file.values()) <= limit or not tensors
    if len(files) == 1:
        assert [path.name for path in folder.iterdir()] == ["model.safetensors"]
        return
    count = len(files)
    assert list(found) == [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {name: file for file in found for name in found[file]}
    assert index["metadata"] == {"total_parameters": 7, "total_size": 8 * sum(sizes)}


def test_files_are_marked_for_torch(tmp_path: Path) -> None:
    shards = Shards(tmp_path, 1)
    shards.add({"x": torch.ones(2)})
    shards.close(parameters=2)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_one_tensor_under_two_names_is_written_twice(tmp_path: Path) -> None:
    shards, shared = Shards(tmp_path, 1000), torch.ones(3)
    shards.add({"x": shared, "y": shared})
    shards.close(parameters=3)
    found = load_file(tmp_path / "model.safetensors")
    assert torch.equal(found["x"], found["y"])


@pytest.mark.parametrize("limit", [1, 1000])
def test_two_tensors_of_one_name_are_refused(tmp_path: Path, limit: int) -> None:
    shards = Shards(tmp_path, limit)
    shards.add({"x": torch.ones(3), "y": torch.ones(3)})
    with pytest.raises(ConfigurationError, match="would be saved as x"):
        shards.add({"x": torch.ones(3)})


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
