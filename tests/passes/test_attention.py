"""Queries, keys and values of attention, in graphs of every tracer."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compressed_tensors.quantization.lifecycle import fake_quantize
from graphs import TRACERS, inputs_for, observed, qparams_of, targets, trace, with_constants
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

from inlay import Recipe
from inlay.graph import observes, slots_of
from inlay.passes import FoldQParams, Pipeline, RemoveObservers
from inlay.recipe import Plan

pytestmark = pytest.mark.slow

HEADS, GROUPS, SIZE = 4, 2, 2
X = torch.linspace(-2, 2, 24).reshape(1, 3, 8) ** 3


def repeated(states: torch.Tensor, times: int) -> torch.Tensor:
    """Each head as often as there are queries that share it."""
    batch, heads, tokens, size = states.shape
    expanded = states[:, :, None].expand(batch, heads, times, tokens, size)
    return expanded.reshape(batch, heads * times, tokens, size)


def grouped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    times = HEADS // GROUPS
    return F.scaled_dot_product_attention(q, repeated(k, times), repeated(v, times))


def by_name(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, value=v, enable_gqa=True)


def enabled(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def flex(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return flex_attention(q, k, v, enable_gqa=True)


class Attention(nn.Module):
    """Fewer keys and values than queries, as in most language models."""

    def __init__(self, attend: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q_proj = nn.Linear(8, HEADS * SIZE, bias=False)
        self.k_proj = nn.Linear(8, GROUPS * SIZE, bias=False)
        self.v_proj = nn.Linear(8, GROUPS * SIZE, bias=False)
        self.attend = attend

    def states(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {
            name: projection(x).view(1, 3, -1, SIZE).transpose(1, 2)
            for name, projection in (("q", self.q_proj), ("k", self.k_proj), ("v", self.v_proj))
        }

    def forward(self, x: torch.Tensor, past_key_values: None = None) -> torch.Tensor:
        return self.attend(*self.states(x).values())


class Model(nn.Module):
    def __init__(self, attend: Any = grouped) -> None:
        super().__init__()
        self.layer = nn.Module()
        self.layer.self_attn = Attention(attend)
        self.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer.self_attn(x) * 2


def recipe(strategy: str = "tensor") -> Recipe:
    args = {"num_bits": 4, "strategy": strategy, "observer": "static_minmax"}
    return Recipe.from_config(
        {"config_groups": {"a": {"targets": ["re:.*self_attn$"], "input_activations": args}}}
    )


ATTENDS = [grouped, by_name, enabled]
CASES = [(attend, how) for attend in ATTENDS for how in TRACERS] + [
    (flex, "dynamo"),
    (flex, "export"),  # symbolic_trace cannot trace it
]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("strategy", ["tensor", "attn_head"])
@pytest.mark.parametrize(("attend", "how"), CASES)
def test_states_are_observed_and_quantized_before_they_are_repeated(
    attend: Any, how: str, strategy: str
) -> None:
    model = Model(attend)
    plan = Plan(model, recipe(strategy))
    gm = observed(trace(how, model, X), plan)
    (attention,) = [node for node in gm.graph.nodes if slots_of(node)]
    assert sorted(slots_of(attention)) == ["k", "q", "v"]
    with torch.no_grad():
        states = model.layer.self_attn.states(X)
    seen = {slot.base_name: node.args[0] for node in gm.graph.nodes for slot in observes(node)}
    for name, node in seen.items():
        value = node.meta.get("example_value", node.meta.get("val"))
        assert value.shape == states[name].shape, name
    values = {f"layer.self_attn.{name}": value for name, value in states.items()}
    qparams = qparams_of(plan, model, values)
    final = Pipeline((FoldQParams(qparams=qparams), RemoveObservers()))(gm).graph_module
    bound = with_constants(final, plan, model, qparams)
    with torch.no_grad():
        result = bound(*inputs_for(bound, X))
        found = result if isinstance(result, torch.Tensor) else result[0]
        quantized = [
            fake_quantize(
                states[name],
                qparams[f"layer.self_attn.{name}"]["scale"],
                qparams[f"layer.self_attn.{name}"]["zero_point"],
                plan.slots[f"layer.self_attn.{name}"].args,
            )
            for name in "qkv"
        ]
        torch.testing.assert_close(found, attend(*quantized) * 2)
        assert not torch.allclose(found, model(X))


def test_second_fold_changes_nothing() -> None:
    model = Model()
    plan = Plan(model, recipe())
    gm = observed(trace("dynamo", model, X), plan)
    values = {f"layer.self_attn.{name}": v for name, v in model.layer.self_attn.states(X).items()}
    fold = FoldQParams(qparams=qparams_of(plan, model, values))
    once = Pipeline((fold, RemoveObservers()))(gm).graph_module
    assert targets(once).count("quantize_dequantize") == 3
    assert not fold(once).modified


def test_one_tensor_for_keys_and_values_is_quantized_once() -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        both = repeated(k, HEADS // GROUPS)
        return F.scaled_dot_product_attention(q, both, both)

    model = Model(attend)
    plan = Plan(model, recipe())
    gm = observed(trace("dynamo", model, X), plan)
    states = model.layer.self_attn.states(X)
    values = {f"layer.self_attn.{name}": states[name.replace("v", "k")] for name in "qkv"}
    qparams = qparams_of(plan, model, values)
    final = Pipeline((FoldQParams(qparams=qparams), RemoveObservers()))(gm).graph_module
    assert targets(final).count("quantize_dequantize") == 2
    bound = with_constants(final, plan, model, qparams)
    q, k = (
        fake_quantize(
            states[name],
            qparams[f"layer.self_attn.{name}"]["scale"],
            qparams[f"layer.self_attn.{name}"]["zero_point"],
            plan.slots[f"layer.self_attn.{name}"].args,
        )
        for name in "qk"
    )
    torch.testing.assert_close(bound(*inputs_for(bound))[0], attend(q, k, k) * 2)
