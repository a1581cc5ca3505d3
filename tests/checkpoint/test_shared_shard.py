"""Files that several processes write are those that safetensors writes."""

import random
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from inlay.checkpoint.shared_shard import Layout, TensorKind, digest_of, write_tensors
from inlay.errors import ConfigurationError

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.complex64,
    torch.int16,
    torch.float16,
    torch.bfloat16,
    torch.int32,
    torch.float32,
    torch.int64,
    torch.float64,
]
SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)
KINDS = st.lists(st.tuples(st.text(min_size=1, max_size=4), st.sampled_from(DTYPES), SHAPES))


@given(kinds=KINDS, writers=st.integers(1, 4), seed=st.integers(0, 99))
def test_each_writer_fills_its_part_of_the_file_that_safetensors_writes(
    tmp_path_factory: pytest.TempPathFactory,
    kinds: list[tuple[str, torch.dtype, tuple[int, ...]]],
    writers: int,
    seed: int,
) -> None:
    folder, chance = tmp_path_factory.mktemp("shards"), random.Random(seed)
    tensors = {
        f"{name}.weight": (torch.randn(shape) * 50).to(dtype) for name, dtype, shape in kinds
    }
    layout = Layout.of({name: TensorKind.of(name, tensor) for name, tensor in tensors.items()})
    layout.make(folder / "shared")
    names = chance.sample(sorted(tensors), len(tensors))
    digests = {}
    for writer in range(writers):
        own = {name: tensors[name] for name in names[writer::writers]}
        digests |= write_tensors(folder / "shared", layout, own)
    save_file(tensors, folder / "whole", metadata={"format": "pt"})
    assert (folder / "shared").read_bytes() == (folder / "whole").read_bytes()
    assert layout.size == (folder / "whole").stat().st_size
    assert layout.digest(digests) == digest_of(folder / "whole")


def test_a_tensor_is_written_as_it_is_seen(tmp_path: Path) -> None:
    """Whatever its strides; and every byte of a file counts for its fingerprint."""
    tensors = {"turned": torch.arange(6).view(2, 3).T, "same": torch.ones(1, 3).expand(2, 3)}
    tensors["one"] = torch.arange(16).view(4, 4).T[:1, :1]
    layout = Layout.of({name: TensorKind.of(name, tensor) for name, tensor in tensors.items()})
    layout.make(tmp_path / "shared")
    digest = layout.digest(write_tensors(tmp_path / "shared", layout, tensors))
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(whole, tmp_path / "whole", metadata={"format": "pt"})
    content = (tmp_path / "whole").read_bytes()
    assert (tmp_path / "shared").read_bytes() == content
    for place in (len(content) - 1, len(layout.header), len(layout.header) - 1):
        changed = bytearray(content)
        changed[place] ^= 1
        (tmp_path / "changed").write_bytes(changed)
        try:
            assert digest_of(tmp_path / "changed") != digest
        except ValueError:
            assert place < len(layout.header)


def test_what_no_file_can_hold_is_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match=r"fc.weight is of torch.complex128"):
        TensorKind.of("fc.weight", torch.ones(1, dtype=torch.complex128))
