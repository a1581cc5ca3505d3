"""Memory that is freed and asked for again while a batch runs."""

import contextlib
import ctypes
import json
import subprocess
import sys
from collections.abc import Iterator

import pytest

from inlay import memory
from inlay.memory import keeping_freed_memory, return_freed_memory, returning_freed_memory

PAGES = 8 << 20 >> 12  # of one tensor of 8 MiB

# In a process of its own: what a heap looks like depends on all that ran before.
MEASURE = """
import json, resource, torch
from inlay.memory import keeping_freed_memory, return_freed_memory

def drop_several():
    held = [torch.zeros(2 << 20) for _ in range(16)]
    held.clear()

def faults():
    drop_several()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        drop_several()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def resident():
    return int(open("/proc/self/statm").read().split()[1])

outside = faults()
with keeping_freed_memory():
    inside, held = faults(), resident()
return_freed_memory()
print(json.dumps({"outside": outside, "inside": inside, "returned": held - resident()}))
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"), reason="no glibc")
def test_freed_memory_is_used_again_and_returned() -> None:
    done = subprocess.run(
        [sys.executable, "-c", MEASURE], check=True, capture_output=True, text=True
    )
    pages = json.loads(done.stdout)
    assert pages["inside"] < PAGES < pages["outside"]
    assert pages["returned"] > 15 * PAGES


@pytest.fixture
def without_glibc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda _: object())
    memory._glibc.cache_clear()
    yield
    memory._glibc.cache_clear()


@pytest.mark.usefixtures("without_glibc")
def test_nothing_is_done_without_glibc() -> None:
    with keeping_freed_memory():
        pass
    return_freed_memory()


class Glibc:
    """Notes what malloc is told."""

    def __init__(self) -> None:
        self.thresholds: dict[int, int] = {}

    def mallopt(self, parameter: int, value: int) -> None:
        self.thresholds[parameter] = value

    def malloc_trim(self, _: int) -> None:
        pass

    @property
    def mib(self) -> list[float]:
        return [value / (1 << 20) for _, value in sorted(self.thresholds.items(), reverse=True)]


@pytest.fixture
def glibc(monkeypatch: pytest.MonkeyPatch) -> Glibc:
    found = Glibc()
    monkeypatch.setattr(memory, "_glibc", lambda: found)
    for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    return found


def test_settings_end_with_their_context(glibc: Glibc) -> None:
    """And those of a context around it hold again, on errors too."""
    with returning_freed_memory():
        assert glibc.mib == [0.125, 0.125]
        with contextlib.suppress(ValueError), keeping_freed_memory():
            assert glibc.mib == [2047, 1024]
            raise ValueError
        assert glibc.mib == [0.125, 0.125]
    assert glibc.mib == [64, 32]  # the largest thresholds that glibc takes by itself


def test_threads_may_leave_in_any_order(glibc: Glibc) -> None:
    first, second = keeping_freed_memory(), returning_freed_memory()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert glibc.mib == [0.125, 0.125]
    second.__exit__(None, None, None)
    assert glibc.mib == [64, 32]


@pytest.mark.parametrize(
    ("name", "value"),
    [("MALLOC_MMAP_THRESHOLD_", "4096"), ("GLIBC_TUNABLES", "glibc.malloc.trim_threshold=4096")],
)
def test_settings_of_the_user_stay(
    glibc: Glibc, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    with keeping_freed_memory():
        pass
    assert not glibc.thresholds
