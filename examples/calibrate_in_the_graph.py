"""Observers inside the compiled model, then the same compiled model, quantized."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import inlay

sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "vocab_size": 256}
model = LlamaForCausalLM(LlamaConfig(num_attention_heads=4, **sizes)).eval()
recipe = inlay.Recipe.from_preset("FP8")
calibration = inlay.Calibration(model, recipe)
compiled = torch.compile(model, backend=calibration.backend)
with torch.no_grad():
    for _ in range(8):
        logits = compiled(torch.randint(0, 256, (2, 16))).logits  # observed, and unchanged
    qparams = calibration.finalize()
    quantized = compiled(torch.randint(0, 256, (2, 16))).logits
print(qparams["model.layers.0.mlp.down_proj.input"])
print(calibration.explain().splitlines()[0])
