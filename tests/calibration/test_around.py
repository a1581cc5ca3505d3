"""A model around its blocks that runs as it is: when it does, and that it computes the same."""

from typing import Any

import pytest
import torch
from families import batch, bert, llama, mixtral, qwen3
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples
from torch import nn
from transformers import LlamaForCausalLM

from inlay import Calibration, Recipe
from inlay.calibration import running
from inlay.evaluation.compare import compare
from inlay.nodes.call_region import CallRegion

INPUTS = {"observer": "static_minmax"}
STATIC = Recipe.from_preset("W8A8_STATIC", inputs=INPUTS, ignore=["lm_head"])


def observed(model: nn.Module, recipe: Recipe = STATIC, **more: Any) -> Calibration:
    calibration = Calibration(model, recipe, compiler="eager")
    calibration.observe(**batch(model), **more)
    return calibration


def is_traced_around(calibration: Calibration) -> bool:
    """Whether there is a graph that calls blocks or holds them."""
    return not all(graph.is_region for graph in calibration.graphs)


def is_cut(calibration: Calibration) -> bool:
    nodes = (
        node
        for graph in calibration.graphs
        for variant in graph.variants.values()
        for node in variant.graph_module.graph.nodes
    )
    return any(isinstance(node.target, CallRegion) for node in nodes)


class LogitsCounted(nn.Linear):
    """A head that notes for how many tokens it runs."""

    tokens: int = 0

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        type(self).tokens = input.shape[1]
        return super().forward(input)


@pytest.mark.parametrize("family", [llama, qwen3, mixtral])
def test_only_a_block_is_traced(family: Any) -> None:
    model = family(num_hidden_layers=3)
    recipe = Recipe.from_preset("FP8", ignore=["lm_head"])
    calibration = observed(model, recipe)
    assert not is_traced_around(calibration)
    assert len(calibration.graphs) == 1
    assert "around its blocks the model runs as it is" in calibration.explain()


def test_with_and_without_padding_it_is_one_graph() -> None:
    """As when it is traced: untraced, transformers gives blocks no mask if there is no padding."""
    model = llama(num_hidden_layers=2)
    calibration = observed(model)
    padded = batch(model, 1)
    padded["attention_mask"][0, 4:] = 0
    calibration.observe(**padded)
    assert len(calibration.graphs) == 1


def test_the_head_runs_for_one_token(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama(num_hidden_layers=2)
    head = LogitsCounted(32, 96, bias=False)
    monkeypatch.setattr(LogitsCounted, "__module__", "torch.nn")  # so that it counts as known
    model.lm_head = head
    observed(model)
    assert LogitsCounted.tokens == 1
    # A loss is computed from the logits of all tokens.
    tokens = batch(model)["input_ids"]
    observed(model, labels=tokens)
    assert LogitsCounted.tokens == tokens.shape[1]


class OwnLlama(LlamaForCausalLM):
    """A model of which nobody knows what it does around its blocks."""


def compiled_in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="eager")
    return model


def with_own_forward(model: nn.Module) -> nn.Module:
    model.forward = model.forward
    return model


@pytest.mark.parametrize(
    ("model", "recipe"),
    [
        (lambda: OwnLlama(llama().config).eval(), STATIC),
        (lambda: compiled_in_place(llama()), STATIC),
        (lambda: with_own_forward(llama()), STATIC),
        (llama, Recipe.from_preset("W8A8_STATIC", inputs=INPUTS)),
        (llama, Recipe.from_preset("W8A8_STATIC", ignore=["lm_head"], equalize=0.5)),
        (bert, Recipe.from_preset("W8A8_STATIC", inputs=INPUTS)),
    ],
    ids=[
        "unknown class",
        "compiled in place",
        "own forward",
        "static head",
        "equalized",
        "pooler quantized",
    ],
)
def test_traced_if_there_is_something_to_see(model: Any, recipe: Recipe) -> None:
    calibration = observed(model(), recipe)
    assert is_traced_around(calibration)
    assert is_cut(calibration)
    assert "around its blocks" not in calibration.explain()


def test_an_error_leaves_nothing_behind() -> None:
    model = llama(num_hidden_layers=2)
    forward = type(model.model.layers[0]).forward
    calibration = observed(model)
    before = calibration.statistics.snapshot()
    with pytest.raises(IndexError):
        calibration.observe(input_ids=torch.full((1, 8), 96))  # no such token
    assert type(model.model.layers[0]).forward is forward
    assert not torch.compiler.is_compiling()
    assert not any("_inlay_block" in vars(module) for module in model.modules())
    after = calibration.statistics.snapshot()
    assert all(
        torch.equal(before[name].tensors["max_vals"], after[name].tensors["max_vals"])
        for name in before
    )


def test_hooks_see_all_logits() -> None:
    """Some of them only would be a surprise."""
    model = llama(num_hidden_layers=2)
    met: list[torch.Size] = []
    model.lm_head.register_forward_hook(lambda module, args, output: met.append(output.shape))
    assert is_traced_around(observed(model))
    assert set(met) == {torch.Size([2, 6, 96])}


@pytest.mark.slow
@examples(6)
@given(lengths=st.lists(st.integers(2, 9), min_size=1, max_size=3), data=st.data())
def test_same_statistics_as_traced(lengths: list[int], data: st.DataObject) -> None:
    """Of every length and padding, bit for bit, and the same errors of the quantized model."""
    batches = []
    for length in lengths:
        tokens = data.draw(st.lists(st.integers(0, 95), min_size=2 * length, max_size=2 * length))
        padding = data.draw(st.integers(0, length - 1))
        mask = torch.ones(2, length, dtype=torch.int64)
        mask[1, length - padding :] = 0
        batches.append(
            {"input_ids": torch.tensor(tokens).reshape(2, length), "attention_mask": mask}
        )
    torch.manual_seed(0)
    model = llama(num_hidden_layers=2)
    found = []
    for is_left in (True, False):
        torch._dynamo.reset()
        with pytest.MonkeyPatch.context() as patch:
            if not is_left:
                patch.setattr(running, "_can_stay_around", lambda model, plan: False)
            calibration = Calibration(model, STATIC, compiler="eager")
            for one in batches:
                calibration.observe(**one)
            assert is_traced_around(calibration) != is_left
            qparams = calibration.finalize()
            found.append((qparams, compare(model, calibration, batches[:1])))
    (around, errors), (traced, expected) = found
    for slot, own in around.items():
        assert torch.equal(own["scale"], traced[slot]["scale"]), slot
    assert errors == expected
