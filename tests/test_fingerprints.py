"""Fingerprints of weights: equal for the same numbers, different for others."""

from pathlib import Path

import torch
from families import llama, qwen3_moe
from hypothesis import given
from hypothesis import strategies as st

from inlay.checkpoint.loading import load_model
from inlay.checkpoint.stored_model import StoredModel
from inlay.fingerprints import difference, fingerprint, fingerprints, weights_in

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
SHAPES = st.lists(st.integers(1, 40), min_size=0, max_size=3)


@given(SHAPES, st.sampled_from(DTYPES), st.integers(0, 2))
def test_it_is_of_numbers_and_not_of_their_layout(
    shape: list[int], dtype: torch.dtype, turn: int
) -> None:
    tensor = torch.randn(shape).to(dtype)
    order = sorted(range(len(shape)), key=lambda dim: (dim + turn) % len(shape))
    inverse = [order.index(dim) for dim in range(len(shape))]
    turned = tensor.permute(order).contiguous().permute(inverse)
    assert fingerprint(turned) == fingerprint(tensor)
    assert difference({"a": fingerprint(tensor)}, {"a": fingerprint(tensor.double())}) is None
    assert difference({"a": fingerprint(tensor)}, {"a": fingerprint(tensor * 2 + 1)}) is not None


@given(st.integers(1, 300), st.integers(1, 300), st.data())
def test_rows_and_columns_of_a_changed_quarter_are_noticed(
    rows: int, columns: int, data: st.DataObject
) -> None:
    """Fine-tuning changes all of a tensor; a quarter of its rows or columns is enough."""
    tensor, dim = torch.randn(rows, columns), data.draw(st.integers(0, 1))
    size = tensor.shape[dim]
    count = -(-size // 4)
    start = data.draw(st.integers(0, size - count))
    changed = tensor.clone()
    changed.narrow(dim, start, count).add_(1)
    assert fingerprint(changed) != fingerprint(tensor)


def test_a_difference_names_tensors_and_dtypes() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3))).double()
    known = fingerprints(weights_in(model))
    found = fingerprints(weights_in(model.bfloat16()))
    assert difference(known, known) is None
    assert difference(known, found) == (
        "0.bias, 0.weight, 1.bias and 3 more (bfloat16 instead of float64)"
    )
    assert difference({**known, "4.weight": known["0.weight"]}, known) == (
        "4.weight (missing on one side)"
    )
    assert difference(known, dict.fromkeys(known, "")) is None  # offloaded, so unknown


def test_files_and_loaded_models_have_the_same(tmp_path: Path) -> None:
    """Tied weights, dtypes wider than the file, and experts that loading stacks."""
    llama(tie_word_embeddings=True).bfloat16().save_pretrained(tmp_path / "llama")
    qwen3_moe().save_pretrained(tmp_path / "moe")
    for name, dtype in (("llama", "auto"), ("llama", "float32"), ("moe", "auto")):
        loaded = load_model(tmp_path / name, dtype=dtype)
        stored = StoredModel.open(tmp_path / name, dtype=dtype)
        names = stored.names_of(stored.model.parameters())
        assert not stored.fingerprints(names)  # nothing is loaded yet
        stored.load(names)
        found = {**stored.fingerprints(names), **stored.fingerprints_of_buffers()}
        assert dict(sorted(found.items())) == fingerprints(weights_in(loaded))
    on_disk = StoredModel.open(tmp_path / "llama").files.fingerprints()
    in_memory = fingerprints(weights_in(load_model(tmp_path / "llama", dtype="float32")))
    assert difference(on_disk, {name: in_memory[name] for name in on_disk}) is None
