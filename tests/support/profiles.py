"""How many examples Hypothesis tries, and which: always the same ones, or random ones to fuzz."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, register_random, settings

__all__ = ["FUZZING", "count", "examples", "load_profile", "unshrunk"]

FUZZING = os.environ.get("INLAY_EXAMPLES") == "fuzz"
_USUAL = "fuzz" if FUZZING else "same"
_TIMES = 50  # as many examples when fuzzing


class _TorchRandom:
    """Lets Hypothesis seed torch for every example, as it does for `random` and numpy."""

    seed = staticmethod(torch.manual_seed)
    getstate = staticmethod(torch.get_rng_state)
    setstate = staticmethod(torch.set_rng_state)


_TORCH_RANDOM = _TorchRandom()  # Hypothesis refers to it weakly


def load_profile() -> None:
    """Choose the examples of this run. Call it before any test is imported."""
    register_random(_TORCH_RANDOM)
    # Benchmarks judge time. Here a busy machine must not make a test fail.
    always: dict[str, Any] = {
        "deadline": None,
        "print_blob": True,
        "suppress_health_check": [HealthCheck.too_slow],
    }
    settings.register_profile("same", max_examples=30, derandomize=True, database=None, **always)
    settings.register_profile("fuzz", max_examples=60 * _TIMES, **always)
    settings.register_profile(
        "unshrunk", derandomize=True, database=None, phases=[Phase.generate], **always
    )
    settings.load_profile(_USUAL)


@contextmanager
def unshrunk() -> Iterator[None]:
    """For tests of what fails, and not of how: failing examples are left as they were found."""
    settings.load_profile("unshrunk")
    try:
        yield
    finally:
        settings.load_profile(_USUAL)


def examples(number: int) -> settings:
    """Settings of a law whose examples are slow: `number` of them, and more when fuzzing."""
    return settings(max_examples=count(number))


def count(number: int) -> int:
    """How many examples to try where `number` of them are usual."""
    return number * _TIMES if FUZZING else number
