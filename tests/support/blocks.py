"""Blocks of transformers as small as can be, with the parts that equalization meets."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

SIZE = 8
HEAD = 2


@dataclass(frozen=True)
class Form:
    """What a block is made of.

    :param norm: "layer", "rms" (in its arithmetic), "gemma" (which adds 1 to its weight)
    :param mlp: "gated", "relu" or "gelu"
    :param heads: heads of keys and values; four heads of queries share them
    :param attention: "expand", "gqa" or "matmul", by how heads are shared and attention computed
    :param fused: "row" or "head" if one Linear gives queries, keys and values, one after another or
        head by head, and one gives gate and up
    """

    norm: str = "layer"
    mlp: str = "gated"
    heads: int = 2
    attention: str = "expand"
    bias: bool = True
    fused: str = ""


class Norm(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.weight = nn.Parameter(torch.randn(SIZE))
        self.bias = nn.Parameter(torch.randn(SIZE)) if kind == "layer" else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "layer":
            return F.layer_norm(x, (SIZE,), self.weight, self.bias)
        normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return normed * (1.0 + self.weight) if self.kind == "gemma" else self.weight * normed


class Block(nn.Module):
    def __init__(self, form: Form) -> None:
        super().__init__()
        self.form = form
        self.before, self.between = Norm(form.norm), Norm(form.norm)
        width = form.heads * HEAD
        if form.fused:
            self.qkv = nn.Linear(SIZE, SIZE + 2 * width, bias=form.bias)
        else:
            self.q = nn.Linear(SIZE, SIZE, bias=form.bias)
            self.k, self.v = (nn.Linear(SIZE, width, bias=form.bias) for _ in range(2))
        self.o = nn.Linear(SIZE, SIZE, bias=form.bias)
        is_fused = bool(form.fused) and form.mlp == "gated"
        self.up = nn.Linear(SIZE, 24 if is_fused else 12, bias=form.bias)
        gated = form.mlp == "gated" and not is_fused
        self.gate = nn.Linear(SIZE, 12, bias=form.bias) if gated else None
        self.down = nn.Linear(12, SIZE, bias=form.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.o(self.attend(self.before(x)))
        h = self.between(x)
        if self.form.fused and self.form.mlp == "gated":
            gate, up = self.up(h).chunk(2, dim=-1)
            return x + self.down(F.silu(gate) * up)
        if self.gate is not None:
            return x + self.down(F.silu(self.gate(h)) * self.up(h))
        activation: Any = F.relu if self.form.mlp == "relu" else F.gelu
        return x + self.down(F.dropout(activation(self.up(h)), 0.1, self.training))

    def attend(self, h: torch.Tensor) -> torch.Tensor:
        batch, tokens, _ = h.shape
        q, k, v = (
            state.reshape(batch, tokens, -1, HEAD).transpose(1, 2) for state in self.project(h)
        )
        if self.form.attention == "gqa":
            out = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
            return out.transpose(1, 2).flatten(2)
        times = q.shape[1] // k.shape[1]
        if times > 1:
            k, v = (
                s[:, :, None].expand(-1, -1, times, -1, -1).reshape(batch, -1, tokens, HEAD)
                for s in (k, v)
            )
        if self.form.attention == "matmul":
            scores = torch.softmax(q @ k.transpose(-1, -2) / HEAD**0.5, -1)
            out = torch.matmul(scores, v)
        else:
            out = F.scaled_dot_product_attention(q, k, v)
        return out.transpose(1, 2).reshape(batch, tokens, -1)

    def project(self, h: torch.Tensor) -> Any:
        if not self.form.fused:
            return self.q(h), self.k(h), self.v(h)
        both, width = self.qkv(h), self.form.heads * HEAD
        if self.form.fused == "row":
            return both.split([SIZE, width, width], dim=-1)
        heads = both.view(*h.shape[:-1], self.form.heads, -1)
        return heads.split([SIZE // self.form.heads, HEAD, HEAD], dim=-1)


class Blocks(nn.Module):
    """Two blocks, and a head.

    :param shared: a part that the second block has in common with the first
    """

    def __init__(self, form: Form, shared: str | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(form), Block(form)])
        self.norm, self.head = Norm(form.norm), nn.Linear(SIZE, 5)
        if shared is not None and getattr(self.blocks[0], shared, None) is not None:
            setattr(self.blocks[1], shared, getattr(self.blocks[0], shared))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
