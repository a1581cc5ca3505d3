"""Models that run eagerly around their blocks: when they do, and that statistics are the same."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from families import batch, bert, llama, mixtral, qwen3
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples
from torch import nn
from torch._dynamo import guards, symbolic_convert
from transformers import LlamaForCausalLM

from inlay import Calibration, Recipe
from inlay.calibration.tracing import running
from inlay.evaluation.compare import compare
from inlay.nodes.call_body import CallBody

INPUTS = {"observer": "static_minmax"}
STATIC = Recipe.from_preset("W8A8_STATIC", inputs=INPUTS, ignore=["lm_head"])
WITH_HEAD = Recipe.from_preset("W8A8_STATIC", inputs=INPUTS, ignore=())


def observed(model: nn.Module, recipe: Recipe = STATIC, **more: Any) -> Calibration:
    calibration = Calibration(model, recipe, compiler="eager")
    calibration.observe(**batch(model), **more)
    return calibration


def is_traced_around(calibration: Calibration) -> bool:
    """Whether there is a graph that calls blocks or holds them."""
    return not all(graph.is_body for graph in calibration.graphs)


def assert_equal_statistics(one: Calibration, other: Calibration) -> None:
    left, right = one.statistics.snapshot(), other.statistics.snapshot()
    assert left.keys() == right.keys()
    for name, statistics in left.items():
        assert statistics.seen == right[name].seen
        for key, tensor in statistics.tensors.items():
            assert torch.equal(tensor, right[name].tensors[key]), (name, key)


def is_cut(calibration: Calibration) -> bool:
    nodes = (
        node
        for graph in calibration.graphs
        for variant in graph.variants.values()
        for node in variant.graph_module.graph.nodes
    )
    return any(isinstance(node.target, CallBody) for node in nodes)


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
    assert "tracing strategy: one graph for all blocks, eager around them" in calibration.explain()


def test_a_block_is_traced_once_with_a_mask_and_once_without() -> None:
    """An eager model of transformers gives its blocks no mask if a batch has no padding."""
    model = llama(num_hidden_layers=2)
    calibration = observed(model)
    padded = batch(model, 1)
    padded["attention_mask"][0, 4:] = 0
    for one in (padded, batch(model, 2), padded):
        calibration.observe(**one)
    assert len(calibration.graphs) == 2


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
    """A model that no library has written."""


def compiled_in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="eager")
    return model


def with_blocks_in_a_list(model: nn.Module) -> nn.Module:
    """A model that finds its blocks in an attribute which torch does not know."""

    class Listing(type(model.model)):
        def forward(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
            assert all(one is other for one, other in zip(self.found, self.layers, strict=True))
            return super().forward(input_ids=input_ids, **kwargs)

    model.model.__class__ = Listing
    model.model.found = [*model.model.layers]
    return model


def with_own_forward(model: nn.Module) -> nn.Module:
    model.forward = model.forward
    return model


@pytest.mark.parametrize(
    "model",
    [
        lambda: OwnLlama(llama().config).eval(),
        lambda: compiled_in_place(llama()),
        lambda: with_own_forward(llama()),
        lambda: with_blocks_in_a_list(llama()),
    ],
    ids=["unknown class", "compiled in place", "own forward", "blocks in a list"],
)
def test_an_unusual_model_runs_eagerly_too(model: Any) -> None:
    found = observed(model())
    assert not is_traced_around(found)
    expected = observed(llama())
    for name, statistics in found.statistics.snapshot().items():
        assert statistics.tokens == expected.statistics.snapshot()[name].tokens


@pytest.mark.parametrize(
    ("model", "recipe"),
    [
        (llama, Recipe.from_preset("W8A8_STATIC", inputs=INPUTS, ignore=())),
        (llama, Recipe.from_preset("W8A8_STATIC", ignore=["lm_head"], equalize=0.5)),
        (bert, Recipe.from_preset("W8A8_STATIC", inputs=INPUTS)),
    ],
    ids=["static head", "equalized", "pooler quantized"],
)
def test_traced_if_there_is_something_to_see(model: Any, recipe: Recipe) -> None:
    calibration = observed(model(), recipe)
    assert is_traced_around(calibration)
    assert is_cut(calibration)
    assert "eager around them" not in calibration.explain()


@pytest.mark.parametrize("recipe", [STATIC, WITH_HEAD], ids=["eager around", "traced around"])
@pytest.mark.parametrize("at_first", [True, False])
def test_a_bad_batch_is_not_a_reason_to_trace_differently(recipe: Recipe, at_first: bool) -> None:
    """It raises the error of the model, leaves no statistics, and no strategy is given up."""
    model = llama(num_hidden_layers=2)
    calibration = Calibration(model, recipe, compiler="eager")
    if not at_first:
        calibration.observe(**batch(model))
    before = calibration.statistics.snapshot()
    for _ in range(2):
        with pytest.raises(IndexError):
            calibration.observe(input_ids=torch.full((1, 8), 96))  # no such token
    assert calibration.statistics.snapshot().keys() == before.keys()
    calibration.observe(**batch(model, 1))
    expected = Calibration(model, recipe, compiler="eager")
    for index in (1,) if at_first else (0, 1):
        expected.observe(**batch(model, index))
    assert is_traced_around(calibration) == (recipe is WITH_HEAD)
    assert "gave up" not in calibration.explain()
    assert_equal_statistics(calibration, expected)


class OutOfMemory(nn.Linear):
    """Runs out of memory once, in the second block that calls it."""

    calls = 0

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(fails_once(input))


@torch.compiler.allow_in_graph
def fails_once(x: torch.Tensor) -> torch.Tensor:
    if type(x) is torch.Tensor:
        OutOfMemory.calls += 1
        if OutOfMemory.calls == 2:
            raise torch.OutOfMemoryError("no memory left")
    return x * 1


@pytest.mark.parametrize("recipe", [STATIC, WITH_HEAD], ids=["eager around", "traced around"])
def test_running_out_of_memory_is_not_either(recipe: Recipe) -> None:
    """The blocks before have observed their part of the batch, which is forgotten."""
    model = llama(num_hidden_layers=3)
    for layer in model.model.layers:
        layer.mlp.down_proj.__class__ = OutOfMemory
    calibration = Calibration(model, recipe, compiler="eager")
    OutOfMemory.calls = 0  # the plan has called the modules to recognise their products
    with pytest.raises(torch.OutOfMemoryError):
        calibration.observe(**batch(model))
    assert not calibration.statistics.snapshot()
    calibration.observe(**batch(model))
    assert "gave up" not in calibration.explain()
    assert_equal_statistics(calibration, observed(model, recipe))


def test_threads_do_not_meet() -> None:
    """Two models of one class at once: each has its own statistics, and the class is untouched."""
    models = [llama(num_hidden_layers=3), llama(num_hidden_layers=3, rms_norm_eps=1e-3)]
    cls = type(models[0].model.layers[0])
    before = dict(vars(cls)), [dict(vars(module)) for each in models for module in each.modules()]
    functions = guards.profile_guard_manager, symbolic_convert.get_funcname

    def calibrated(model: nn.Module) -> Calibration:
        calibration = Calibration(model, STATIC, compiler="eager")
        for index in range(4):
            calibration.observe(**batch(model, index))
        return calibration

    expected = [calibrated(model) for model in models]
    torch._dynamo.reset()
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(calibrated, models))
    for one, other in zip(found, expected, strict=True):
        assert_equal_statistics(one, other)
        assert not is_traced_around(one)
    after = dict(vars(cls)), [dict(vars(module)) for each in models for module in each.modules()]
    assert after == before
    assert (guards.profile_guard_manager, symbolic_convert.get_funcname) == functions
    assert not torch.compiler.is_compiling()


def test_hooks_see_all_logits() -> None:
    """Some of them only would be a surprise."""
    model = llama(num_hidden_layers=2)
    met: list[torch.Size] = []
    model.lm_head.register_forward_hook(lambda module, args, output: met.append(output.shape))
    observed(model)
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
                patch.setattr(running, "_observes_around", lambda model, plan: True)
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
