"""A model with the modules of a Llama and little else, for tests that are not about attention.

Dynamo traces it ten times as fast: no rotary embedding, no mask, no cache, no configuration.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.modeling_outputs import CausalLMOutput

__all__ = ["plain_llama"]

_WIDTH, _INNER, _WORDS = 32, 64, 96


def plain_llama(num_hidden_layers: int = 2) -> nn.Module:
    torch.manual_seed(0)
    return PlainLlama(num_hidden_layers).eval()


class PlainLlama(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        blocks = nn.ModuleList([_Block() for _ in range(layers)])
        self.model = nn.ModuleDict({"embed_tokens": nn.Embedding(_WORDS, _WIDTH), "layers": blocks})
        self.lm_head = nn.Linear(_WIDTH, _WORDS, bias=False)

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, position_ids: Any = None
    ) -> Any:
        x = self.model["embed_tokens"](input_ids)
        for block in self.model["layers"]:
            x = block(x, attention_mask)
        return CausalLMOutput(logits=self.lm_head(x))


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn, self.mlp = _Mixing(), _Gated()
        self.norms = nn.ModuleList([nn.RMSNorm(_WIDTH) for _ in range(2)])

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.norms[0](x), mask)
        return x + self.mlp(self.norms[1](x))


class _Mixing(nn.Module):
    """Mixes a word with all those before it, so that its input depends on their order."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            self.add_module(name, nn.Linear(_WIDTH, _WIDTH, bias=False))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        values = self.v_proj(x) * mask.unsqueeze(-1)
        return self.o_proj((torch.sigmoid(self.q_proj(x) * self.k_proj(x)) * values).cumsum(-2))


class _Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(_WIDTH, _INNER, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(_INNER, _WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
