import gc
import os
import sys

# Some virtual machines announce AMX and cannot execute it: a product in bfloat16 would end the
# process with an illegal instruction. oneDNN reads this when torch is imported.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
# No test reaches a hub, however it is started.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import profiles
import pytest
import torch

profiles.load_profile()

# Two processes share two cores, so each has one.
torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else 2)

# Graphs are many small objects, and collecting those of torch again and again takes a while.
gc.set_threshold(20_000, 50, 100)
# Dynamo empties the processor's caches to time the guards of each graph, and only logs the time.
torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0  # type: ignore[attr-defined]


# Tests that take longest, so that none of them is left for one process when the other is done.
_FIRST = (
    "test_examples.py",
    "test_types.py",
    "test_for_real.py",
    "test_inductor.py",
    "test_families.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Move slow tests to the front, module by module."""
    names = {name: place for place, name in enumerate(_FIRST)}

    def place(item: pytest.Item) -> tuple[bool, int]:
        slow = item.get_closest_marker("slow") is not None
        return not slow, names.get(item.path.name, len(names))

    items.sort(key=place)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Let no test depend on those that ran before it in the same process."""
    torch.manual_seed(0)
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()  # it gives up on a function that was compiled too often
