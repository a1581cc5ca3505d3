"""`oneshot` with Inlay's pipeline gives what it gives with `basic`, bit for bit."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from families import bert, gemma3, llama, mixtral, qwen3
from peer import (
    CACHE,
    EAGER,
    assert_same_tensors,
    grouped,
    preset,
    qparams,
    quantized,
    static,
)
from torch import nn

pytestmark = pytest.mark.filterwarnings("ignore")  # what the peer warns of is theirs

FAMILIES = {"llama": llama, "qwen3": qwen3, "gemma3": gemma3, "bert": bert, "mixtral": mixtral}
RECIPES: dict[str, Callable[[], Any]] = {
    "W8A8 static": static,
    "W8A8": lambda: preset("W8A8"),
    "FP8": lambda: preset("FP8"),
    "NVFP4": lambda: preset("NVFP4"),
    "W4A16, imatrix": lambda: grouped("imatrix_mse"),
    "FP8, cache": lambda: preset("FP8", kv_cache_scheme=CACHE),
}
CASES = [(f, r) for f in FAMILIES for r in RECIPES if (f, r) != ("bert", "FP8, cache")]


def build(family: str) -> nn.Module:
    return FAMILIES[family](num_hidden_layers=1)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "recipe"), CASES)
def test_equal_to_basic(family: str, recipe: str) -> None:
    expected = quantized(build(family), RECIPES[recipe](), "basic")
    found = quantized(build(family), RECIPES[recipe](), EAGER)
    assert_same_tensors(found.state_dict(), expected.state_dict())
