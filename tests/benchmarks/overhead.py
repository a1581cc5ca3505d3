"""What observers cost: the observed forward over the plain compiled one."""

from collections.abc import Iterator
from typing import Any

import torch
from harness import Row, interleave, ratio
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from inlay import Calibration, Recipe

OBSERVERS = ["static_minmax", "minmax", "histogram", "mse"]
EQUALIZED = "static_minmax, ranges of channels too"  # what equalization needs


EXPERTS = [8, 64]


def model(vocabulary: int = 4096, depth: int = 6, width: int = 512) -> torch.nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_hidden_layers=depth,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=vocabulary,
        use_cache=False,
    )
    return LlamaForCausalLM(config).eval()


def batch(vocabulary: int = 4096) -> dict[str, Any]:
    return {"input_ids": torch.randint(0, vocabulary, (4, 128))}


def recipe(observer: str) -> Recipe:
    equalize = 0.7 if observer == EQUALIZED else None
    inputs = {"observer": observer.partition(",")[0]}
    return Recipe.from_preset("W8A8_STATIC", ignore=["lm_head"], inputs=inputs, equalize=equalize)


def rows(rounds: int = 15) -> Iterator[Row]:
    torch._dynamo.reset()
    llama, one = model(), batch()
    ways = {"plain": torch.compile(llama)}
    observers = [*OBSERVERS, EQUALIZED]
    calibrations = {name: Calibration(llama, recipe(name)) for name in observers}
    for name, calibration in calibrations.items():
        ways[name] = torch.compile(llama, backend=calibration.backend)
    with torch.no_grad():
        taken = interleave({name: lambda run=run: run(**one) for name, run in ways.items()}, rounds)
    for name in observers:
        yield Row("observed forward / plain compiled", name, ratio(taken[name], taken["plain"]))
    yield from _pruned(rounds)
    for experts in EXPERTS:
        yield from _of_experts(experts, rounds)


def _pruned(rounds: int) -> Iterator[Row]:
    """A large vocabulary, which `observe` does not compute."""
    torch._dynamo.reset()
    vocabulary = 32000
    llama, one = model(vocabulary), batch(vocabulary)
    plain = torch.compile(llama)
    calibration = Calibration(llama, recipe("static_minmax"))
    with torch.no_grad():
        taken = interleave(
            {"plain": lambda: plain(**one), "observe": lambda: calibration.observe(**one)}, rounds
        )
    yield Row(
        "observe() / plain compiled",
        "static_minmax, 32000 words",
        ratio(taken["observe"], taken["plain"]),
    )


def _of_experts(experts: int, rounds: int) -> Iterator[Row]:
    """Inputs observed for each expert, however many there are."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        hidden_size=512,
        intermediate_size=1024,
        moe_intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        num_experts=experts,
        num_experts_per_tok=2,
        vocab_size=4096,
        use_cache=False,
    )
    mixture, one = Qwen3MoeForCausalLM(config).eval(), batch()
    plain = torch.compile(mixture)
    static = Recipe.from_preset("FP8", ignore=["lm_head", "re:.*gate$"])
    calibration = Calibration(mixture, static)
    observed = torch.compile(mixture, backend=calibration.backend)
    with torch.no_grad():
        taken = interleave({"plain": lambda: plain(**one), "own": lambda: observed(**one)}, rounds)
    yield Row(
        "observed forward / plain compiled",
        f"FP8, inputs of each of {experts} experts",
        ratio(taken["own"], taken["plain"]),
    )
