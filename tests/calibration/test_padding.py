"""Padding is left out of every statistic, in the graph."""

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from families import bert, llama
from hypothesis import given
from hypothesis import strategies as st
from plain_llama import plain_llama
from profiles import examples
from torch import nn

from inlay import Calibration, Recipe
from inlay.calibration.tracing.strategies import call
from inlay.errors import StatisticsError
from inlay.observers import Observer, flatten_for_calibration
from inlay.testing.modules import SequenceModule, TwoSequencesModule, sequence_modules

PER_TENSOR = QuantizationArgs(num_bits=8, strategy="tensor")
OBSERVERS = ["static_minmax", "minmax", "memoryless_minmax", "mse", "memoryless_mse", "histogram"]


def statistics(observer: Observer) -> dict[str, torch.Tensor]:
    return {
        name: value for name, value in vars(observer).items() if isinstance(value, torch.Tensor)
    }


@pytest.mark.parametrize("name", OBSERVERS)
@examples(25)
@given(data=st.data())
def test_observing_what_is_valid_is_observing_it_alone(name: str, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 6))
    valid = torch.tensor(data.draw(st.lists(st.booleans(), min_size=count, max_size=count)))
    valid[data.draw(st.integers(0, count - 1))] = True
    seed = data.draw(st.integers(0, 1000))
    rows = torch.randn(count, 8, generator=torch.Generator().manual_seed(seed))
    rows[~valid] *= 100
    masked, alone = (
        Observer.load_from_registry(name, base_name="input", args=PER_TENSOR) for _ in range(2)
    )
    for scale in (1.0, 2.0):
        flat = flatten_for_calibration(rows * scale, "input", masked.args)
        masked.update_statistics_from_valid(flat, valid)
        alone(rows[valid] * scale)
    for key, value in statistics(alone).items():
        torch.testing.assert_close(getattr(masked, key), value)


def test_importance_of_valid_rows() -> None:
    x, valid = torch.randn(5, 8), torch.tensor([True, False, True, True, False])
    masked, alone = (
        Observer.load_from_registry("imatrix_mse", base_name="weight", args=PER_TENSOR)
        for _ in range(2)
    )
    for _ in range(2):
        masked.observe_valid_input(x, valid)
        alone.observe_input(x[valid])
    torch.testing.assert_close(masked._imatrix_sum, alone._imatrix_sum)
    assert int(masked._imatrix_count) == int(alone._imatrix_count) == 6


def padded(lengths: list[int], side: str) -> list[dict[str, torch.Tensor]]:
    """Sequences in one batch with padding, then each in a batch of its own without."""
    longest = max(lengths)
    ids = torch.randint(3, 60, (len(lengths), longest))
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        place = slice(0, length) if side == "right" else slice(longest - length, None)
        mask[row, place] = 1
    ids = ids * mask
    alone = [row[keep.bool()].unsqueeze(0) for row, keep in zip(ids, mask, strict=True)]
    return [_batch(ids, mask), *(_batch(row, torch.ones_like(row)) for row in alone)]


def _batch(ids: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    positions = (mask.cumsum(-1) - 1).clamp(min=0)  # a token is where it is without padding
    return {"input_ids": ids, "attention_mask": mask, "position_ids": positions}


def observed(model: nn.Module, recipe: Recipe, batches: list, **options: object) -> Calibration:
    torch._dynamo.reset()  # Hypothesis calls this often in one test
    calibration = Calibration(model, recipe, compiler="eager", **options)
    for one in batches:
        calibration.observe(**one)
    return calibration


# The first is always shorter than the second, so that there is padding.
LENGTHS = st.tuples(st.integers(2, 4), st.integers(6, 9), st.integers(1, 9)).map(list)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "side"),
    [(llama, "left"), (bert, "right"), (plain_llama, "left"), (plain_llama, "right")],
)
@examples(1)
@given(lengths=LENGTHS)
def test_padded_batches_equal_sequences_one_by_one(family, side: str, lengths: list[int]) -> None:
    """The plain one gives its blocks the mask of the batch itself."""
    model = family(num_hidden_layers=1)
    kv_cache = {"num_bits": 8, "type": "float", "observer": "static_minmax"}
    recipe = Recipe.from_preset(
        "W8A8_STATIC",
        ignore=["re:.*pooler.*"] if family is bert else ["lm_head"],
        inputs={"observer": "static_minmax"},
        outputs={"num_bits": 8, "strategy": "tensor", "observer": "histogram"},
        kv_cache=kv_cache if family is llama else None,
    )
    batch, *alone = padded(lengths, side)
    together, apart = observed(model, recipe, [batch]), observed(model, recipe, alone)
    states = together.statistics.snapshot()
    assert states.keys() == apart.statistics.snapshot().keys()
    for name, state in states.items():
        other = apart.statistics.snapshot()[name]
        assert int(state.tokens) == int(other.tokens) == sum(lengths)
        for key in ("min_vals", "max_vals"):
            torch.testing.assert_close(state.tensors[key], other.tensors[key], rtol=1e-4, atol=1e-5)
        if "counts" in state.tensors:
            assert int(state.tensors["counts"].sum()) == int(other.tensors["counts"].sum())


@pytest.mark.slow
def test_padding_counts_if_asked_to() -> None:
    model, (batch, *_) = llama(), padded([2, 7], "right")
    recipe = Recipe.from_preset("W8A8_STATIC", ignore=["lm_head"])
    slot = "model.layers.0.mlp.down_proj.input"
    tokens = {
        counted: int(
            observed(model, recipe, [batch], count_padding=counted)
            .statistics.snapshot()[slot]
            .tokens
        )
        for counted in (False, True)
    }
    assert tokens == {False: 9, True: 14}


@pytest.mark.slow
def test_a_batch_of_nothing_but_padding_changes_nothing() -> None:
    model, (batch, *_) = llama(), padded([4, 4], "right")
    recipe = Recipe.from_preset("W8A8_STATIC", ignore=["lm_head"])
    empty = {**batch, "attention_mask": torch.zeros_like(batch["attention_mask"])}
    once = observed(model, recipe, [batch])
    twice = observed(model, recipe, [empty, batch, empty])
    for name, state in once.statistics.snapshot().items():
        other = twice.statistics.snapshot()[name]
        assert int(other.seen) == 1
        for key, value in state.tensors.items():
            assert torch.equal(value, other.tensors[key])


@Observer.register("test_mean_of_all")
class MeanOfAll(Observer):
    """It knows nothing of padding."""

    def update_statistics_from_observed(self, observed: torch.Tensor) -> None:
        self.max_vals = observed.abs().mean(dim=(0, -1))
        self.min_vals = -self.max_vals


@Observer.register("test_branch_on_all")
class BranchOnAll(MeanOfAll):
    """It cannot be traced either."""

    def update_statistics_from_observed(self, observed: torch.Tensor) -> None:
        if bool(observed.abs().max() > 0):
            super().update_statistics_from_observed(observed)


@pytest.mark.slow
def test_an_observer_that_knows_nothing_of_padding_says_so() -> None:
    recipe = Recipe.from_preset("W8A8_STATIC", inputs={"observer": "test_mean_of_all"})
    with pytest.warns(UserWarning, match="test_mean_of_all counts the padding"):
        observed(llama(), recipe, padded([3, 5], "right")[:1])


@pytest.mark.slow
def test_an_observer_outside_the_graph_leaves_out_padding() -> None:
    recipe = Recipe.from_preset("W8A8_STATIC", inputs={"observer": "test_branch_on_all"})
    batch, *_ = padded([3, 5], "right")
    with pytest.warns(UserWarning, match="cannot be traced"):
        calibration = observed(llama(), recipe, [batch])
    assert int(calibration.statistics.snapshot()["model.layers.0.mlp.down_proj.input"].tokens) == 8


MINMAX = Recipe.from_preset("W8A8_STATIC", inputs={"observer": "static_minmax"})


def statistics_of(model: nn.Module, batches: list, **options: object) -> dict:
    """How many tokens each slot has seen, and their extremes."""
    torch._dynamo.reset()
    calibration = Calibration(model, MINMAX, compiler="eager", progress=False, **options)
    for one in batches:
        call(calibration.observe, one)
    found = calibration.stored().slots
    return {
        name: [int(one.tokens), one.tensors["min_vals"], one.tensors["max_vals"]]
        for name, one in found.items()
    }


def assert_same(found: dict, expected: dict) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name][0] == values[0], name
        torch.testing.assert_close(found[name][1:], values[1:], rtol=1e-4, atol=1e-5)


def with_lengths(lengths: list[int], width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids that begin each row, and their mask."""
    mask = (torch.arange(width) < torch.tensor(lengths)[:, None]).long()
    return torch.randint(1, 16, mask.shape) * mask, mask


@st.composite
def sequences(draw: st.DrawFn, model: SequenceModule) -> tuple[list, list]:
    """A padded batch, by name or by position, then its sequences one by one.

    Often there are as many rows as tokens, and as many tokens for the decoder as for the encoder.
    """
    rows, width = draw(st.integers(2, 4)), draw(st.integers(3, 5))
    lengths = st.lists(st.integers(1, width), min_size=rows, max_size=rows)
    padded = dict(
        zip(("input_ids", "attention_mask"), with_lengths(draw(lengths), width), strict=True)
    )
    if isinstance(model, TwoSequencesModule):
        ids, mask = with_lengths(draw(lengths), width)
        if not draw(st.booleans()):  # without a mask, all tokens of the decoder are valid
            ids, mask = torch.randint(1, 16, ids.shape), None
        padded |= {"decoder_input_ids": ids, "decoder_attention_mask": mask}
    alone = []
    for row in range(rows):
        kept = padded["attention_mask"][row].bool()
        one = {key: padded[key][row : row + 1, kept] for key in ("input_ids", "attention_mask")}
        if isinstance(model, TwoSequencesModule):
            own = torch.ones(width).bool() if mask is None else mask[row].bool()
            one["decoder_input_ids"] = padded["decoder_input_ids"][row : row + 1, own]
        alone.append(one)
    padded = {key: value for key, value in padded.items() if value is not None}
    return [tuple(padded.values()) if draw(st.booleans()) else padded], alone


@pytest.mark.slow
@examples(12)
@given(data=st.data())
def test_a_model_of_any_layout_leaves_out_padding(data: st.DataObject) -> None:
    model = data.draw(sequence_modules())
    batch, alone = data.draw(sequences(model))
    assert_same(statistics_of(model, batch), statistics_of(model, alone))


BATCH_FIRST = ("batch first", False)


@pytest.mark.parametrize(
    "model",
    [
        SequenceModule([BATCH_FIRST, ("batch first", True)], reads_mask=True),
        SequenceModule([("tokens first", False), ("columns", False)]),
        TwoSequencesModule([BATCH_FIRST]),
    ],
    ids=["graph break", "as many rows as tokens", "encoder and decoder of one length"],
)
def test_sizes_are_no_evidence(model: SequenceModule) -> None:
    lengths = [5, 2, 3, 1, 4]
    ids, mask = with_lengths(lengths, 5)
    batch = {"input_ids": ids, "attention_mask": mask}
    alone = [
        {name: value[row : row + 1, :length] for name, value in batch.items()}
        for row, length in enumerate(lengths)
    ]
    if isinstance(model, TwoSequencesModule):
        batch["decoder_input_ids"] = torch.randint(1, 16, ids.shape)
        for row, one in enumerate(alone):
            one["decoder_input_ids"] = batch["decoder_input_ids"][row : row + 1]
    expected = statistics_of(model, alone)
    assert_same(statistics_of(model, [batch]), expected)
    assert_same(statistics_of(model, [tuple(batch.values())]), expected)


class Strided(nn.Module):
    """Sees two tokens at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.fc = nn.Embedding(16, 4), nn.Linear(8, 4)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        x = self.table(input_ids)
        return self.fc(x[:, : x.shape[1] // 2 * 2].unflatten(1, (-1, 2)).flatten(2))


def test_values_that_are_not_those_of_tokens_are_refused_by_name() -> None:
    ids, mask = with_lengths([6, 3], 6)
    batch = {"input_ids": ids, "attention_mask": mask}
    with pytest.raises(StatisticsError, match=r"fc\.input: its leading sizes .* Use batch_size=1"):
        statistics_of(Strided(), [batch])
    assert statistics_of(Strided(), [batch], count_padding=True)["fc.input"][0] == 6
