"""What observers cost: the observed forward over the plain compiled one."""

from collections.abc import Iterator
from typing import Any

import torch
from harness import Ratio, interleave, ratio
from transformers import LlamaConfig, LlamaForCausalLM

from inlay import Calibration, Recipe

OBSERVERS = ["static_minmax", "minmax"]


def model(vocabulary: int = 4096) -> torch.nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=vocabulary,
        use_cache=False,
    )
    return LlamaForCausalLM(config).eval()


def batch(vocabulary: int = 4096) -> dict[str, Any]:
    return {"input_ids": torch.randint(0, vocabulary, (4, 128))}


def rows(rounds: int = 15) -> Iterator[tuple[str, Ratio]]:
    llama, one = model(), batch()
    ways = {"plain": torch.compile(llama)}
    calibrations = {}
    for name in OBSERVERS:
        recipe = Recipe.from_preset("W8A8_STATIC", ignore=["lm_head"], inputs={"observer": name})
        calibrations[name] = Calibration(llama, recipe)
        ways[name] = torch.compile(llama, backend=calibrations[name].backend)
    with torch.no_grad():
        taken = interleave({name: lambda run=run: run(**one) for name, run in ways.items()}, rounds)
    for name in OBSERVERS:
        yield f"observed forward, {name}", ratio(taken[name], taken["plain"])
    yield from _pruned(rounds)


def _pruned(rounds: int) -> Iterator[tuple[str, Ratio]]:
    """A large vocabulary, which `observe` does not compute."""
    torch._dynamo.reset()
    vocabulary = 32000
    llama, one = model(vocabulary), batch(vocabulary)
    plain = torch.compile(llama)
    recipe = Recipe.from_preset(
        "W8A8_STATIC", ignore=["lm_head"], inputs={"observer": "static_minmax"}
    )
    calibration = Calibration(llama, recipe)
    with torch.no_grad():
        taken = interleave(
            {"plain": lambda: plain(**one), "observe": lambda: calibration.observe(**one)}, rounds
        )
    yield "observe() with 32000 words, static_minmax", ratio(taken["observe"], taken["plain"])
