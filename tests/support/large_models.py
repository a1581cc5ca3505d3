"""Models too large for a test to hold, with random weights that are written block by block."""

import json
import math
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 512


def write_llama(folder: Path, *, blocks: int, hidden: int, intermediate: int) -> int:
    """Write a Llama of bfloat16 weights, one file for each block, and return the bytes of one."""
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=blocks,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        vocab_size=VOCABULARY,
        dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(folder)
    with torch.device("meta"):
        model: nn.Module = LlamaForCausalLM(config)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    weight_map: dict[str, str] = {}
    sizes = [0] * (blocks + 1)
    for number in range(blocks + 1):
        prefix = f"model.layers.{number}."
        names = [name for name in shapes if name.startswith(prefix)]
        if number == blocks:
            names = [name for name in shapes if not name.startswith("model.layers.")]
        tensors = {name: _random(shapes[name], place) for place, name in enumerate(names)}
        file = f"model-{number + 1:05d}-of-{blocks + 1:05d}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, file))
        sizes[number] = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return sizes[0]


@cache  # blocks have the same weights: to make others would take longer than to run them
def _random(shape: torch.Size, place: int) -> torch.Tensor:
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(place)
    values = torch.randn(shape, generator=generator, dtype=torch.float32)
    return (values / math.sqrt(shape[-1])).bfloat16()
