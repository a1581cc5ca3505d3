"""What is said of the change from a model to its quantized self, against formulas by hand."""

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compressed_tensors.quantization.lifecycle import fake_quantize
from families import batch, bert, llama
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from inlay import Calibration, ConfigurationError, GraphError, Recipe
from inlay.evaluation import measures
from inlay.evaluation.compare import Comparison, compare
from inlay.evaluation.layer_errors import Noise
from inlay.evaluation.measures import NO_LABEL, Choices, Vectors, next_tokens

STATIC = Recipe.from_preset("W8A8_STATIC", ignore=(), inputs={"observer": "static_minmax"})
CAUSAL = Recipe.from_preset("W8A8_STATIC", ignore=["lm_head"], inputs={"observer": "static_minmax"})


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch._dynamo.reset()


class Pair(nn.Module):
    """Two layers, of which the second may be given fewer rows than the first."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(width, 16), nn.Linear(16, width)

    def forward(self, x: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        return self.second(self.first(x).relu())


class Masked(Pair):
    """The same, reading its mask as attention does."""

    def forward(self, x: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        output = super().forward(x)
        if attention_mask is None:
            return output
        return output.masked_fill(attention_mask.unsqueeze(-1) == 0, 0)


class Broken(Pair):
    """The same, in two graphs, of which neither reads the mask."""

    def forward(self, x: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        hidden = self.first(x).relu()
        torch._dynamo.graph_break()
        return self.second(hidden)


def finalized(model: nn.Module, recipe: Recipe, batches: list[Any], **kwargs: Any) -> Calibration:
    calibration = Calibration(model, recipe, compiler="eager")
    for one in batches:
        calibration.observe(*one) if isinstance(one, tuple) else calibration.observe(**one)
    calibration.finalize(**kwargs)
    return calibration


def padded(model: nn.Module, index: int) -> dict[str, Any]:
    one = batch(model, index)
    one["attention_mask"][0, 4:] = 0
    return one


def decibels(exact: torch.Tensor, quantized: torch.Tensor) -> float:
    exact, quantized = exact.double(), quantized.double()
    return 10 * math.log10(float(exact.square().sum() / (quantized - exact).square().sum()))


def values(comparison: Comparison) -> dict[str, Any]:
    return {change.name: change for change in comparison.changes}


# The measures


@given(st.floats(0.01, 100), st.floats(0.01, 100))
def test_sqnr_does_not_depend_on_the_unit(unit: float, error: float) -> None:
    exact = torch.tensor([3.0, -4.0])
    noisy = exact + torch.tensor([error, 0.0])
    expected = 10 * math.log10(25 / error**2)
    assert Noise().add(exact * unit, noisy * unit).decibels == pytest.approx(expected, abs=1e-2)


def test_sqnr_of_what_has_no_number() -> None:
    one, zero = torch.ones(3), torch.zeros(3)
    assert Noise().decibels is None
    assert Noise().add(one, one).decibels == math.inf
    assert Noise().add(zero, zero).decibels is None
    assert Noise().add(zero, one).decibels == -math.inf
    assert Noise().add(one * math.nan, one).decibels is None


def test_sqnr_adds_powers_over_batches() -> None:
    one, two = torch.randn(2, 4, 5).unbind()
    noise = Noise()
    for part in (one, two):
        noise.add(part, part.round())
    whole = torch.cat([one, two])
    assert noise.decibels == pytest.approx(decibels(whole, whole.round()), abs=1e-4)


@pytest.mark.parametrize("chunk", [1, 40, 1 << 24])
def test_choices_by_hand(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    """Whatever number of rows is worked on at a time."""
    monkeypatch.setattr(measures, "_CHUNK", chunk)
    torch.manual_seed(0)
    before, after = torch.randn(2, 12, 9).unbind()
    labels = torch.randint(0, 9, (12,))
    labels[3] = NO_LABEL
    measure = Choices()
    measure.add(before[:5], after[:5], labels[:5])
    measure.add(before[5:], after[5:], labels[5:])
    agreement, divergence, perplexity, ratio = measure.changes()
    assert agreement.value == (before.argmax(-1) == after.argmax(-1)).float().mean()
    p, q = before.softmax(-1), after.softmax(-1)
    assert divergence.value == pytest.approx(float((p * (p / q).log()).sum(-1).mean()), rel=1e-5)
    for logits, value in ((before, perplexity.before), (after, perplexity.after)):
        assert value == pytest.approx(float(F.cross_entropy(logits, labels).exp()), rel=1e-5)
    assert ratio.value == pytest.approx(perplexity.after / perplexity.before, rel=1e-6)
    reverse = measure.estimates()["kl_reverse"].value
    assert reverse == pytest.approx(float((q * (q / p).log()).sum(-1).mean()), rel=1e-5)
    assert measure.findings() == []


def test_choices_that_are_ruled_out_weigh_nothing() -> None:
    before, after = torch.tensor([[1.0, 2.0, -math.inf]]), torch.tensor([[2.0, 1.0, -math.inf]])
    measure, without = Choices(), Choices()
    measure.add(before, after)
    without.add(before[:, :2], after[:, :2])
    assert [c.value for c in measure.changes()] == [c.value for c in without.changes()]


def test_broken_rows_are_left_out_and_told_of() -> None:
    before, after = torch.randn(2, 6, 4).unbind()
    clean = Choices()
    clean.add(before[2:], after[2:])
    before[0, 1], after[1, 2] = math.nan, math.inf
    measure = Choices()
    measure.add(before, after)
    assert [c.value for c in measure.changes()] == [c.value for c in clean.changes()]
    first, second = (finding.text for finding in measure.findings())
    assert "already gave NaN or Inf at 1 of 6 positions" in first
    assert "quantized model gives NaN or Inf at 1 of 6 positions" in second


def test_vectors_by_hand() -> None:
    before, after = torch.randn(2, 5, 4).unbind()
    before[0] = after[0] = 0  # the same, though without direction
    after[4, 0] = math.nan
    measure = Vectors("tokens", of="the output")
    measure.add(before, after)
    cosine, error = measure.changes()
    before, after = before[:4], after[:4]
    angles = (before * after).sum(-1)[1:] / before.norm(dim=-1)[1:] / after.norm(dim=-1)[1:]
    assert cosine.value == pytest.approx((float(angles.sum()) + 1) / 4, rel=1e-5)
    assert error.value == pytest.approx(float((after - before).norm() / before.norm()), rel=1e-5)
    assert "1 of 5 tokens" in measure.findings()[0].text


def test_nothing_was_measured() -> None:
    assert Choices().changes() == []
    assert Vectors("tokens", of="the output").changes() == []


def test_the_next_token_counts_if_both_do() -> None:
    ids = torch.arange(8).reshape(2, 4)
    counted = torch.tensor([[1, 1, 1, 0], [0, 1, 1, 1]]).bool()
    no = NO_LABEL
    assert next_tokens(ids, counted).tolist() == [[1, 2, no, no], [no, 6, 7, no]]
    assert next_tokens(ids, None).tolist() == [[1, 2, 3, no], [5, 6, 7, no]]


# Layers


def test_layers_by_hand() -> None:
    """SQNR of output, weight and input, from compressed-tensors' own quantization."""
    model = Pair()
    x = torch.randn(2, 5, 8)
    calibration = finalized(model, STATIC, [{"x": x}])
    held_out = [{"x": torch.randn(2, 5, 8)} for _ in range(3)]
    layers = {layer.module: layer for layer in compare(model, calibration, held_out).layers}
    assert list(layers) == ["first", "second"]

    def quantized(slot: str, value: torch.Tensor) -> torch.Tensor:
        known, args = calibration.qparams[slot], calibration.statistics.plan.slots[slot].args
        return fake_quantize(value, known["scale"], known["zero_point"], args)

    with torch.no_grad():
        inputs = torch.cat([model.first(one["x"]).relu() for one in held_out])
        rounded = quantized("second.input", inputs)
        weight = quantized("second.weight", model.second.weight)
        output = decibels(model.second(inputs), F.linear(rounded, weight, model.second.bias))
    assert layers["second"].sqnr_db == pytest.approx(output, abs=1e-3)
    assert layers["second"].input_sqnr_db == pytest.approx(decibels(inputs, rounded), abs=1e-3)
    expected = decibels(model.second.weight.detach(), weight)
    assert layers["second"].weight_sqnr_db == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("make", [Pair, Masked, Broken])
def test_padding_does_not_count_for_layers_and_outputs(make: type[Pair]) -> None:
    """Whether or not the graph of a layer reads the mask."""
    model = make()
    calibration = finalized(model, STATIC, [{"x": torch.randn(2, 5, 8)}])
    x = torch.randn(2, 5, 8)
    mask = torch.ones(2, 5, dtype=torch.long)
    mask[1, 3:] = 0
    wild = x.clone()
    wild[1, 3:] = 1e6
    found = [
        compare(model, calibration, [{"x": value, "attention_mask": mask}]) for value in (x, wild)
    ]
    assert found[0] == found[1]
    assert found[0] != compare(model, calibration, [{"x": wild}])


def test_without_data_weights_still_have_an_error() -> None:
    recipe = Recipe.from_preset("W8A16", targets=["Linear", "Embedding"], weights={"group_size": 8})
    model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 8))
    calibration = finalized(model, recipe, [(torch.arange(16),)])
    found = compare(model, calibration, [])
    assert (found.batches, found.changes, found.findings) == (0, (), ())
    for layer, module in zip(found.layers, model, strict=True):
        slot = calibration.statistics.plan.slots[f"{layer.module}.weight"]
        with calibration.graphs.rerun() as rerun:
            folded = rerun.bindings.folded(slot)
        expected = decibels(module.weight.detach(), folded)
        assert layer.weight_sqnr_db == pytest.approx(expected, abs=1e-3)
        assert (layer.sqnr_db, layer.input_sqnr_db) == (None, None)


def test_a_weight_without_error() -> None:
    model = nn.Sequential(nn.Linear(8, 4, bias=False))
    with torch.no_grad():  # of powers of two, and of the largest number of float8
        model[0].weight.copy_(torch.tensor([448.0, 2, 4, 8, -16, 0.5, 0, 1]).expand(4, 8))
    recipe = Recipe.from_preset("W8A8_STATIC", weights={"type": "float", "strategy": "tensor"})
    calibration = finalized(model, recipe, [(torch.randn(3, 8),)])
    (layer,) = compare(model, calibration, [(torch.randn(3, 8),)]).layers
    assert layer.weight_sqnr_db == math.inf
    assert math.isfinite(layer.sqnr_db)


# Models


@pytest.mark.slow
def test_language_model_by_hand() -> None:
    model = llama()
    calibration = finalized(model, CAUSAL, [batch(model, index) for index in range(2)])
    held_out = [padded(model, index) for index in (7, 8)]
    found = compare(model, calibration, held_out)
    assert list(values(found)) == [
        "Top-1 agreement",
        "KL divergence",
        "Perplexity",
        "Perplexity ratio",
    ]

    compiled = torch.compile(model, backend=calibration.backend)
    rows: list[list[torch.Tensor]] = [[], [], []]
    surprise: list[list[torch.Tensor]] = [[], []]
    with torch.no_grad():
        for one in held_out:
            pair = [run(**one).logits for run in (model, compiled)]
            for sequence, length in ((0, 4), (1, 6)):  # the first has two tokens of padding
                ids = one["input_ids"][sequence, 1:length]
                for index, logits in enumerate(pair):
                    rows[index].append(logits[sequence, :length])
                    own = logits[sequence, : length - 1]
                    surprise[index].append(F.cross_entropy(own, ids, reduction="none"))
    before, after = torch.cat(rows[0]), torch.cat(rows[1])
    assert not torch.equal(before, after)
    agreement = (before.argmax(-1) == after.argmax(-1)).float().mean()
    divergence = F.kl_div(
        after.log_softmax(-1), before.log_softmax(-1), log_target=True, reduction="batchmean"
    )
    perplexity = values(found)["Perplexity"]
    assert values(found)["Top-1 agreement"].value == pytest.approx(float(agreement))
    assert values(found)["KL divergence"].value == pytest.approx(float(divergence), rel=1e-2)
    assert perplexity.before == pytest.approx(float(torch.cat(surprise[0]).mean().exp()), rel=1e-5)
    assert perplexity.after == pytest.approx(float(torch.cat(surprise[1]).mean().exp()), rel=1e-5)
    assert len(found.layers) == 14


@pytest.mark.slow
def test_encoder_by_hand() -> None:
    model = bert()
    calibration = finalized(model, STATIC, [batch(model, index) for index in range(2)])
    one = padded(model, 7)
    found = compare(model, calibration, [one])
    compiled = torch.compile(model, backend=calibration.backend)
    with torch.no_grad():
        states = [run(**one).last_hidden_state for run in (model, compiled)]
    counted = one["attention_mask"].bool()
    before, after = (state[counted] for state in states)
    expected = {
        "Cosine similarity, tokens": F.cosine_similarity(before, after, dim=-1).mean(),
        "Relative error, tokens": (after - before).norm() / before.norm(),
    }
    before, after = (torch.stack([state[0, :4].mean(0), state[1].mean(0)]) for state in states)
    expected["Cosine similarity, sequences"] = F.cosine_similarity(before, after, dim=-1).mean()
    expected["Relative error, sequences"] = (after - before).norm() / before.norm()
    assert {name: change.value for name, change in values(found).items()} == pytest.approx(
        {name: float(value) for name, value in expected.items()}, rel=1e-4
    )


@pytest.mark.slow
def test_the_cache_counts_too() -> None:
    """With keys and values in two bits the output is further off than with weights alone."""
    model = llama(num_hidden_layers=1)
    held_out = [batch(model, 7)]
    moved = []
    for cache in (None, {"num_bits": 2, "strategy": "tensor"}):
        recipe = Recipe.from_preset(
            "W8A16", ignore=["lm_head"], weights={"strategy": "channel"}, kv_cache=cache
        )
        calibration = finalized(model, recipe, [batch(model)])
        moved.append(values(compare(model, calibration, held_out))["KL divergence"].value)
    assert moved[1] > 10 * moved[0]


@dataclass
class Scores:
    """An output that is neither a tuple nor a mapping."""

    loss: torch.Tensor
    logits: torch.Tensor


class Returning(nn.Module):
    """A layer whose output is given as the test likes."""

    def __init__(self, wrap: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.wrap = nn.Linear(8, 6), wrap

    def forward(self, x: torch.Tensor) -> Any:
        return self.wrap(self.layer(x))


@pytest.mark.parametrize(
    ("wrap", "names"),
    [
        (lambda y: (y.sum(), y), ["Cosine similarity, sequences", "Relative error, sequences"]),
        (lambda y: {"loss": y.sum(), "logits": y}, ["Top-1 agreement", "KL divergence"]),
        (lambda y: Scores(y.sum(), y), ["Top-1 agreement", "KL divergence"]),
        (lambda y: {"score": y[:, :1]}, ["Relative error, sequences"]),
        (lambda y: y[:, None, :, None], ["Cosine similarity, sequences"]),
        (lambda y: {"best": y.argmax(-1), "router": (y,)}, []),
        (lambda y: None, []),
    ],
)
def test_outputs_of_all_sorts(wrap: Any, names: list[str]) -> None:
    model = Returning(wrap)
    calibration = finalized(model, STATIC, [(torch.randn(4, 8),)])
    found = compare(model, calibration, [(torch.randn(4, 8),)])
    assert list(values(found))[: len(names)] == names
    assert bool(found.changes) == bool(names)
    assert found.layers[0].sqnr_db is not None


def test_broken_outputs_are_told() -> None:
    model = Pair()
    calibration = finalized(model, STATIC, [(torch.randn(4, 8),)])
    x = torch.randn(4, 8)
    clean = compare(model, calibration, [(x[1:],)])
    x[0, 0] = math.nan
    found = compare(model, calibration, [(x,)])
    expected = {name: change.value for name, change in values(clean).items()}
    assert {n: change.value for n, change in values(found).items()} == pytest.approx(expected)
    (finding,) = found.findings
    assert "1 of 4 sequences" in finding.text
    assert found.layers[0].sqnr_db is None
    assert found.layers[0].weight_sqnr_db is not None


def test_the_model_and_the_calibration_stay_as_they_are() -> None:
    model = Pair()
    calibration = finalized(model, STATIC, [(torch.randn(4, 8),)])
    model.train()
    model.second.eval()
    compare(model, calibration, [(torch.randn(4, 8),)])
    assert (model.training, model.first.training, model.second.training) == (True, True, False)
    assert not model.first._forward_pre_hooks
    assert not calibration.graphs.bindings.weights._folded


def test_a_model_compiled_in_place_is_compared_with_its_plain_self() -> None:
    model = Pair()
    calibration = Calibration(model, STATIC, compiler="eager")
    model.compile(backend=calibration.backend)
    with torch.no_grad():
        model(torch.randn(4, 8))
    calibration.finalize()
    found = compare(model, calibration, [(torch.randn(4, 8),)])
    assert values(found)["Relative error, sequences"].value > 0


def test_refusals() -> None:
    model, other = Pair(), Pair()
    calibration = Calibration(model, STATIC, compiler="eager")
    calibration.observe(torch.randn(4, 8))
    with pytest.raises(ConfigurationError, match="finalize the calibration before"):
        compare(model, calibration, [])
    calibration.finalize()
    with pytest.raises(ConfigurationError, match=r"weight of first is not the one"):
        compare(other, calibration, [])
    with (
        torch.compiler.set_stance("force_eager"),
        pytest.raises(GraphError, match=r"torch\.compile is turned off"),
    ):
        compare(model, calibration, [(torch.randn(4, 8),)])
