"""What the pass finds, in graphs of all tracers, and what it must leave alone."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graphs import TRACERS, Functional, linear, ops, trace
from torch import nn

from inlay import Recipe
from inlay.graph import Equalizable, equalizable
from inlay.passes import Annotate, FindEqualizable, InsertObservers, Pipeline
from inlay.recipe import Plan

X = torch.randn(2, 3, 4)
RECIPE = Recipe.from_preset("W8A8_STATIC", equalize=0.5)


def found(how: str, model: nn.Module, *args: torch.Tensor, recipe: Recipe = RECIPE) -> Equalizable:
    plan = Plan(model, recipe)
    gm = Pipeline((Annotate(plan=plan), FindEqualizable(plan=plan)))(trace(how, model, *args))
    result = equalizable(gm.graph_module)
    assert result is not None
    return result


def producers(result: Equalizable) -> list[list[str]]:
    """The parameters that each group divides, by their last names."""
    return [[_last(p.source.name) for p in group.producers] for group in result.groups]


def _last(name: str) -> str:
    name = name.replace("_parameters_", ".").replace("_modules_", ".")
    return ".".join(name.replace("l_self", "").strip("._").split(".")[-2:])


def reasons(result: Equalizable) -> list[str]:
    return [reason for _, reason in result.refused]


def norm(size: int = 4) -> nn.LayerNorm:
    torch.manual_seed(7)
    made = nn.LayerNorm(size)
    nn.init.normal_(made.weight)
    nn.init.normal_(made.bias)
    return made


def test_docstring_example() -> None:
    model = Functional(lambda self, x: self.fc(self.norm(x)), fc=linear(), norm=norm())
    plan = Plan(model, RECIPE)
    annotated = Annotate(plan=plan)(trace("dynamo", model, X)).graph_module
    result = FindEqualizable(plan=plan)(annotated)
    assert result.modified
    assert producers(equalizable(result.graph_module)) == [["norm.weight", "norm.bias"]]
    (group,) = equalizable(result.graph_module).groups
    assert [_last(reader.name) for reader in group.readers] == ["fc.weight"]
    observed = InsertObservers()(result.graph_module).graph_module
    notes = [line.partition("  # ")[2] for line in ops(observed) if line.startswith("observe(")]
    assert notes == ["fc.input, by InsertObservers", "fc.input:channels, by InsertObservers"]


def test_second_run_changes_nothing_and_the_input_is_left_alone() -> None:
    model = Functional(lambda self, x: self.fc(self.norm(x)), fc=linear(), norm=norm())
    plan = Plan(model, RECIPE)
    annotated = Annotate(plan=plan)(trace("dynamo", model, X)).graph_module
    once = FindEqualizable(plan=plan)(annotated)
    assert equalizable(annotated) is None
    assert not FindEqualizable(plan=plan)(once.graph_module).modified


def test_a_recipe_that_does_not_equalize_changes_nothing() -> None:
    model = Functional(lambda self, x: self.fc(self.norm(x)), fc=linear(), norm=norm())
    plan = Plan(model, Recipe.from_preset("W8A8_STATIC"))
    result = FindEqualizable(plan=plan)(Annotate(plan=plan)(trace("dynamo", model, X)).graph_module)
    assert not result.modified
    assert equalizable(result.graph_module) is None


class Rms(nn.Module):
    """A norm in its arithmetic; `offset` is added to its weight, as in Gemma."""

    def __init__(self, size: int = 4, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size))
        self.offset = offset

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.float64)
        normed = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
        return (
            normed * (self.offset + self.weight.to(x.dtype))
            if self.offset
            else (self.weight * normed)
        )


def _gated(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.down(F.silu(self.gate(x)) * self.up(x))


def _plain(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.down(F.dropout(F.relu(self.up(x)), 0.1, self.training))


def _attention(self: Any, x: torch.Tensor, groups: int = 2) -> torch.Tensor:
    """Two heads of keys and values of size 2, each read by two heads of queries."""
    batch, tokens, _ = x.shape
    q, k, v = (
        layer(x).view(batch, tokens, -1, 2).transpose(1, 2) for layer in (self.q, self.k, self.v)
    )
    k, v = (
        s[:, :, None].expand(batch, 2, groups, tokens, 2).reshape(batch, -1, tokens, 2)
        for s in (k, v)
    )
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return self.o(out.transpose(1, 2).reshape(batch, tokens, -1))


def _matmul_attention(self: Any, x: torch.Tensor) -> torch.Tensor:
    scores = torch.softmax(self.q(x) @ self.k(x).transpose(-1, -2), -1)
    return self.o(torch.matmul(scores, self.v(x)))


def attention_modules() -> dict[str, nn.Module]:
    return {
        "q": linear(8, 4),
        "k": linear(4, 4, seed=1),
        "v": nn.Linear(4, 4),
        "o": linear(4, 8, seed=3),
    }


@pytest.mark.parametrize("how", TRACERS)
@pytest.mark.parametrize(
    ("forward", "modules", "expected"),
    [
        (
            lambda s, x: s.fc(s.norm(x)),
            {"norm": norm(), "fc": linear()},
            ["norm.weight", "norm.bias"],
        ),
        (lambda s, x: s.fc(s.norm(x)), {"norm": nn.RMSNorm(4), "fc": linear()}, ["norm.weight"]),
        (
            lambda s, x: s.b(torch.abs(-s.a(x)).contiguous().view(-1, 4)),
            {"a": nn.Linear(4, 4), "b": linear()},
            ["a.weight", "a.bias"],
        ),
        (
            lambda s, x: s.b(s.act(s.a(x))),
            {"a": linear(), "b": linear(seed=1), "act": nn.ReLU()},
            ["a.weight"],
        ),
        (_gated, {"gate": linear(), "up": linear(seed=1), "down": linear(seed=2)}, ["up.weight"]),
        (_plain, {"up": nn.Linear(4, 6), "down": linear(4, 6)}, ["up.weight", "up.bias"]),
    ],
)
def test_producers(how: str, forward: Any, modules: dict[str, nn.Module], expected: Any) -> None:
    model = Functional(forward, **modules).eval()
    assert expected in producers(found(how, model, X))


@pytest.mark.parametrize("how", ["dynamo", "export"])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_norms_in_their_arithmetic(how: str, offset: float) -> None:
    model = Functional(lambda s, x: s.fc(s.norm(x)), norm=Rms(offset=offset), fc=linear())
    (group,) = found(how, model, X).groups
    (producer,) = group.producers
    assert producer.offset == offset


@pytest.mark.parametrize("how", ["dynamo", "export"])
def test_heads_that_queries_share_have_one_scale(how: str) -> None:
    model = Functional(_attention, **attention_modules())
    (group,) = found(how, model, X).groups
    assert (group.shape, group.tied) == ((2, 2, 2), (1,))
    assert [p.axes for p in group.producers] == [(0, 2), (0, 2)]


@pytest.mark.parametrize("how", ["dynamo", "export"])
def test_attention_by_products_of_matrices(how: str) -> None:
    modules = {"q": linear(), "k": linear(), "v": linear(), "o": linear()}
    assert ["v.weight"] in producers(found(how, Functional(_matmul_attention, **modules), X))


def _shared_by_queries(self: Any, x: torch.Tensor) -> torch.Tensor:
    batch, tokens, _ = x.shape
    q, k, v = (
        layer(x).view(batch, tokens, -1, 2).transpose(1, 2) for layer in (self.q, self.k, self.v)
    )
    out = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    return self.o(out.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("how", ["dynamo", "export"])
def test_attention_that_shares_heads_by_itself(how: str) -> None:
    (group,) = found(how, Functional(_shared_by_queries, **attention_modules()), X).groups
    assert (group.shape, group.tied) == ((2, 2, 2), (1,))


def _fused_mlp(self: Any, x: torch.Tensor) -> torch.Tensor:
    gate, up = self.gate_up(x).chunk(2, dim=-1)
    return self.down(up * F.silu(gate))


def _fused_attention(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Queries, keys and values one after another, as in Phi-3."""
    batch, tokens, _ = x.shape
    q, k, v = self.qkv(self.norm(x)).split([4, 2, 2], dim=-1)
    q, k, v = (s.view(batch, tokens, -1, 2).transpose(1, 2) for s in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    return self.o(out.transpose(1, 2).reshape(batch, tokens, -1))


def _sliced_attention(self: Any, x: torch.Tensor) -> torch.Tensor:
    batch, tokens, _ = x.shape
    qkv = self.qkv(self.norm(x))
    q, k, v = qkv[..., :4], qkv[..., 4:6], qkv[..., 6:]
    q, k, v = (s.view(batch, tokens, -1, 2).transpose(1, 2) for s in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    return self.o(out.transpose(1, 2).reshape(batch, tokens, -1))


def _interleaved_attention(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Queries, keys and values of one head after another, as in GPT-NeoX."""
    batch, tokens, _ = x.shape
    q, k, v = self.qkv(self.norm(x)).view(batch, tokens, 2, 6).transpose(1, 2).chunk(3, dim=-1)
    out = F.scaled_dot_product_attention(q, k, v)
    return self.o(out.transpose(1, 2).reshape(batch, tokens, -1))


def _indexed_attention(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Queries, keys and values of a head by their numbers, as in Falcon."""
    batch, tokens, _ = x.shape
    qkv = self.qkv(self.norm(x)).view(batch, tokens, 2, 3, 2)
    q, k, v = (qkv[..., number, :].transpose(1, 2) for number in range(3))
    out = F.scaled_dot_product_attention(q, k, v)
    return self.o(out.transpose(1, 2).reshape(batch, tokens, -1))


@pytest.mark.parametrize("how", ["dynamo", "export"])
@pytest.mark.parametrize(
    ("forward", "width", "rows"),
    [
        (_fused_attention, 8, ((8, 6, 2),)),
        (_sliced_attention, 8, ((8, 6, 2),)),
        (_interleaved_attention, 12, ((2, 0, 2), (6, 4, 2))),
        (_indexed_attention, 12, ((2, 0, 2), (3, 2, 1), (2, 0, 2))),
    ],
)
def test_values_in_a_projection_of_queries_and_all(
    how: str, forward: Any, width: int, rows: Any
) -> None:
    modules = {"norm": norm(), "qkv": nn.Linear(4, width), "o": linear(seed=1)}
    result = found(how, Functional(forward, **modules), X)
    assert producers(result) == [["norm.weight", "norm.bias"], ["qkv.weight", "qkv.bias"]]
    assert {p.rows for p in result.groups[1].producers} == {rows}


@pytest.mark.parametrize("how", ["dynamo", "export"])
def test_up_in_a_projection_of_gate_and_up(how: str) -> None:
    model = Functional(_fused_mlp, gate_up=nn.Linear(4, 12), down=linear(4, 6))
    (group,) = found(how, model, X).groups
    assert [p.rows for p in group.producers] == [((12, 6, 6),)] * 2


def test_readers_share_a_group_also_behind_a_view() -> None:
    model = Functional(
        lambda s, x: (s.a(s.norm(x)), s.b(s.norm(x)), s.c(s.norm(x).reshape(-1, 4))),
        norm=norm(), a=linear(), b=linear(seed=1), c=linear(seed=2),
    )  # fmt: skip
    once = Functional(
        lambda s, x: (lambda h: (s.a(h), s.b(h), s.c(h.reshape(-1, 4))))(s.norm(x)),
        norm=norm(), a=linear(), b=linear(seed=1), c=linear(seed=2),
    )  # fmt: skip
    (group,) = found("dynamo", once, X).groups
    assert len(group.readers) == 3
    # A norm that is called three times makes three values, all of which divide its weight.
    assert len(found("dynamo", model, X).groups) == 3


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (lambda s, x: s.fc(x), "it comes from outside the graph"),
        (lambda s, x: s.fc(F.gelu(s.a(x))), "gelu does not commute with a scale per channel"),
        (lambda s, x: (lambda h: s.fc(h) + h)(s.norm(x)), "add reads it too"),
        (lambda s, x: (lambda h: (s.fc(h), h))(s.norm(x)), "the graph returns it"),
        (lambda s, x: (lambda h: s.fc(h) + s.kept(h))(s.norm(x)), "a Linear that is not quantized"),
        (lambda s, x: s.fc(s.norm(x) + 1), "add with a constant"),
        (lambda s, x: (lambda h: s.fc(h * F.relu(h)))(s.a(x)), "mul also reads it by another way"),
        (lambda s, x: s.fc(s.a(x).add_(1)), "add_ changes it in place"),
        (lambda s, x: s.fc(s.a(x).flip(-1)), "flip does not commute"),
        (lambda s, x: (lambda h: s.short(h[..., :2]) + h[..., 1:].sum())(s.a(x)), "getitem reads"),
        (lambda s, x: s.short(s.a(x)[..., ::2]), "a part of its channels is read"),
        (lambda s, x: s.fc(F.layer_norm(x, (4,))), "no weight for each channel"),
        ((lambda s, x: (lambda h: s.fc(h / h))(s.a(x))), "div also reads it by another way"),
        (lambda s, x: s.fc(s.a(x).to(torch.int32).to(x.dtype)), "to rounds it"),
        (lambda s, x: s.fc(torch.div(s.a(x), 2, rounding_mode="floor")), "div rounds it"),
        (lambda s, x: (lambda h: s.fc(h[:, -1]) + h[:, 0])(s.a(x)), "add reads it too"),
    ],
)
def test_reasons(forward: Any, reason: str) -> None:
    modules = {
        "fc": linear(), "a": linear(seed=1), "kept": linear(seed=2), "norm": norm(),
        "short": linear(4, 2),
    }  # fmt: skip
    model = Functional(forward, **modules)
    recipe = Recipe.from_preset("W8A8_STATIC", equalize=0.5, ignore=["kept"])
    given = found("dynamo", model, X, recipe=recipe)
    assert any(reason in given_reason for given_reason in reasons(given)), reasons(given)


def test_a_quantized_output_and_quantized_values_are_left_alone() -> None:
    model = Functional(lambda s, x: s.b(s.a(x)), a=linear(), b=linear(seed=1))
    recipe = Recipe.from_preset("W8A8_STATIC", outputs={"num_bits": 8}, equalize=0.5)
    result = found("dynamo", model, X, recipe=recipe)
    assert "what it is computed from is quantized as an output" in reasons(result)
