"""Comparing the folders of two checkpoints."""

import json
from collections.abc import Collection
from pathlib import Path

import torch
from safetensors import safe_open

from inlay import StoredStatistics


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, whatever its files."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            found.update({name: opened.get_tensor(name) for name in opened.keys()})  # noqa: SIM118
    return found


def assert_same_files(one: Path, other: Path) -> None:
    """Both have the same files of weights, byte for byte, and nothing that is hidden."""
    names = sorted(path.name for path in other.glob("*.safetensors*"))
    assert sorted(path.name for path in one.glob("*.safetensors*")) == names
    for name in names:
        assert (one / name).read_bytes() == (other / name).read_bytes(), name
    assert not list(one.rglob(".*"))


def report_in(folder: Path) -> dict:
    """Return what a report says, without what differs from run to run, streamed or in memory."""
    report = json.loads((folder / "report.json").read_text())["report"]
    changing = ("created", "stages", "tracing", "peak_memory", "tokens_per_second")
    return {key: value for key, value in report.items() if key not in changing}


UNCHECKED = "It was not checked that the traced model equals the eager one"


def assert_same_folder(one: Path, other: Path, *, but: Collection[str] = ()) -> None:
    """Tensors, statistics, configs and report are the same, bit for bit.

    :param but: what the reports may say differently
    """
    found, expected = tensors_in(one), tensors_in(other)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(_bits(found[name]), _bits(tensor)), name
    for name in ("config.json", "generation_config.json", "recipe.yaml", "tokenizer.json"):
        files = [folder / name for folder in (one, other)]
        assert files[0].exists() == files[1].exists(), name
        assert not files[0].exists() or files[0].read_text() == files[1].read_text(), name
    assert_same_statistics(one, other)
    if (one / "report.json").exists() or (other / "report.json").exists():
        found, expected = report_in(one), report_in(other)
        for report in (found, expected):  # a run in memory checks its trace, a streamed one cannot
            report["findings"] = [f for f in report["findings"] if UNCHECKED not in f["text"]]
        for key in expected.keys() - set(but):
            assert found[key] == expected[key], key


def assert_same_statistics(one: Path, other: Path) -> None:
    found, expected = StoredStatistics.load(one), StoredStatistics.load(other)
    assert found.slots.keys() == expected.slots.keys()
    assert found.data_seen == expected.data_seen
    assert (found.groups, found.strengths) == (expected.groups, expected.strengths)
    assert found.is_second_run == expected.is_second_run
    assert found.weights == expected.weights != {}
    assert found.scales.keys() == expected.scales.keys()
    for name, scales in expected.scales.items():
        assert torch.equal(found.scales[name], scales), name
    for name, slot in expected.slots.items():
        assert int(found.slots[name].seen) == int(slot.seen), name
        assert int(found.slots[name].tokens) == int(slot.tokens), name
        for key, tensor in slot.tensors.items():
            assert torch.equal(found.slots[name].tensors[key], tensor), (name, key)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)
