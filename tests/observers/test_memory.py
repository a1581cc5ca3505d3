"""How much a search holds at once, counted by watching every tensor that is made."""

import weakref

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from inlay.observers import Observer
from inlay.testing.strategies import NVFP4

pytestmark = pytest.mark.slow


class PeakMemory(TorchDispatchMode):
    """Bytes of the storages that are alive at the same time, at the most."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._watch(leaf.untyped_storage())
        self.peak = max(self.peak, sum(self.alive.values()))
        return result

    def _watch(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self.alive:
            self.alive[key] = storage.nbytes()
            weakref.finalize(storage, self.alive.pop, key, None)


@pytest.mark.filterwarnings("ignore:imatrix_mse searches without importance")
@pytest.mark.parametrize("name", ["memoryless_mse", "mse", "imatrix_mse"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "fields", [{"num_bits": 4, "strategy": "group", "group_size": 64}, NVFP4], ids=["int4", "nvfp4"]
)
def test_a_search_holds_few_copies(name: str, dtype: torch.dtype, fields: dict) -> None:
    weight = torch.randn(256, 1024).to(dtype)
    of = Observer.load_from_registry(
        name, base_name="weight", args=QuantizationArgs(**fields), maxshrink=0.9, patience=100
    )
    with PeakMemory() as memory:
        of(weight)
    copies = memory.peak / (weight.numel() * 4)
    assert 0.5 < copies < 8, f"held {copies:.1f} float32 copies of the weight"
