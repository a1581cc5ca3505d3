"""Laws of statistics as values: measured, merged, and asked for qparams."""

import functools

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples

from inlay.errors import StatisticsError
from inlay.recipe import Gathers, Slot
from inlay.statistics.value import Statistics, measure, merge
from inlay.testing.strategies import tensors

pytestmark = pytest.mark.slow

MERGED_EXACTLY = ["static_minmax", "histogram"]  # minima, maxima and sums of whole numbers
AVERAGED = ["minmax", "mse"]
IMPORTANCE = "imatrix_mse"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PER_TENSOR = {"num_bits": 8, "strategy": "tensor"}
PER_HEAD = {"num_bits": 8, "strategy": "attn_head"}
FEATURES = 4
laws = examples(25)


def slot(observer: str, base_name: str = "input") -> Slot:
    fields = PER_HEAD if base_name == "k" else PER_TENSOR
    gathers = Gathers.RANGE
    if observer == IMPORTANCE:
        gathers, fields = Gathers.IMPORTANCE, {"num_bits": 4, "strategy": "channel"}
    return Slot("fc", base_name, QuantizationArgs(**fields, observer=observer), gathers)


@st.composite
def values(draw: st.DrawFn, dtype: torch.dtype, base_name: str = "input") -> torch.Tensor:
    """A value of several sequences; heads and tokens as attention has them for `k`."""
    rows, tokens = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    shape = (rows, 2, tokens, FEATURES) if base_name == "k" else (rows, tokens, FEATURES)
    return draw(tensors(shape, dtype))


@st.composite
def masks(draw: st.DrawFn, value: torch.Tensor, base_name: str = "input") -> torch.Tensor:
    """A mask of the value's tokens with at least one that counts."""
    rows, tokens = value.shape[0], value.shape[2] if base_name == "k" else value.shape[1]
    kept = draw(st.lists(st.booleans(), min_size=rows * tokens, max_size=rows * tokens))
    kept[draw(st.integers(0, len(kept) - 1))] = True
    return torch.tensor(kept).reshape(rows, tokens).long()


def assert_same(one: Statistics, other: Statistics, *, close: bool = False) -> None:
    assert int(one.seen) == int(other.seen)
    assert int(one.tokens) == int(other.tokens)
    assert one.tensors.keys() == other.tensors.keys()
    for name, tensor in one.tensors.items():
        assert tensor.dtype == other.tensors[name].dtype
        if close:
            torch.testing.assert_close(tensor, other.tensors[name], rtol=2e-2, atol=0)
        else:
            assert torch.equal(tensor, other.tensors[name]), name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("observer", [*MERGED_EXACTLY, *AVERAGED, IMPORTANCE])
@laws
@given(data=st.data())
def test_merging_is_associative(observer: str, dtype: str, data) -> None:
    """Exactly for minima, maxima and whole numbers; averages and sums of squares are rounded."""
    a, b, c = (measure(slot(observer), data.draw(values(DTYPES[dtype]))) for _ in range(3))
    left, right = merge(merge(a, b), c), merge(a, merge(b, c))
    assert_same(left, right, close=observer not in MERGED_EXACTLY)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("observer", [*MERGED_EXACTLY, *AVERAGED, IMPORTANCE])
@laws
@given(data=st.data())
def test_merging_is_commutative(observer: str, dtype: str, data) -> None:
    a, b = (measure(slot(observer), data.draw(values(DTYPES[dtype]))) for _ in range(2))
    assert_same(merge(a, b), merge(b, a))


@pytest.mark.parametrize("base_name", ["input", "k"])
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("observer", MERGED_EXACTLY)
@laws
@given(data=st.data())
def test_measuring_a_whole_is_merging_its_parts(
    observer: str, dtype: str, padded: bool, base_name: str, data
) -> None:
    value = data.draw(values(DTYPES[dtype], base_name))
    mask = data.draw(masks(value, base_name)) if padded else torch.ones(1)
    whole = measure(slot(observer, base_name), value, mask if padded else None)
    parts = []
    for row in range(value.shape[0]):
        kept = mask[row : row + 1] if padded else None
        if kept is None or bool(kept.any()):
            parts.append(measure(slot(observer, base_name), value[row : row + 1], kept))
    merged = functools.reduce(merge, parts)
    for name, tensor in whole.tensors.items():
        assert torch.equal(tensor, merged.tensors[name]), name
    assert int(whole.tokens) == int(merged.tokens)


@pytest.mark.parametrize("dtype", DTYPES)
@laws
@given(data=st.data())
def test_importance_of_a_whole_is_that_of_its_parts(dtype: str, data) -> None:
    value = data.draw(values(DTYPES[dtype]))
    mask = data.draw(masks(value))
    whole = measure(slot(IMPORTANCE), value, mask)
    alone = value[mask.bool()]
    assert_same(whole, measure(slot(IMPORTANCE), alone), close=True)
    assert int(whole.tensors["_imatrix_count"]) == int(mask.sum())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("observer", [*MERGED_EXACTLY, *AVERAGED, "memoryless_minmax"])
@laws
@given(data=st.data())
def test_an_observer_that_takes_values_in_follows_what_was_measured(observer, dtype, data) -> None:
    """`update_statistics_from_observed` is "merge what was there with what was measured"."""
    of = slot(observer)
    observer_ = of.make_observer()
    batches = data.draw(st.lists(values(DTYPES[dtype]), min_size=1, max_size=4))
    for value in batches:
        observer_(value)
    measured = [measure(of, value).tensors for value in batches]
    expected = functools.reduce(of.make_observer().follow, measured)
    for name, tensor in expected.items():
        assert torch.equal(getattr(observer_, name), tensor), name
    if observer in MERGED_EXACTLY:
        merged = functools.reduce(merge, (measure(of, value) for value in batches))
        for name, tensor in merged.tensors.items():
            assert torch.equal(getattr(observer_, name), tensor), name


@laws
@given(data=st.data(), constant=st.sampled_from([0.01, 0.25, 1.0]))
def test_a_moving_average_depends_on_the_order_by_these_weights(data, constant: float) -> None:
    args = QuantizationArgs(
        **PER_TENSOR, observer="minmax", observer_kwargs={"averaging_constant": constant}
    )
    of = Slot("fc", "input", args)
    drawn = tensors((2, FEATURES), scaled=False)
    batches = data.draw(st.lists(drawn, min_size=1, max_size=5))
    observer = of.make_observer()
    for value in batches:
        observer(value)
    last = len(batches) - 1
    weights = [constant * (1 - constant) ** (last - i) for i in range(len(batches))]
    weights[0] = (1 - constant) ** last
    expected = sum(w * float(b.max()) for w, b in zip(weights, batches, strict=True))
    torch.testing.assert_close(observer.max_vals, torch.tensor([expected]), rtol=1e-4, atol=1e-5)


@laws
@given(data=st.data())
def test_merged_averages_weigh_sources_by_the_values_they_saw(data) -> None:
    of = slot("minmax")
    one, two, three = (measure(of, data.draw(values(torch.float32))) for _ in range(3))
    found = merge(merge(one, two), three).tensors["max_vals"]
    sources = [source.tensors["max_vals"].double() for source in (one, two, three)]
    torch.testing.assert_close(found.double(), sum(sources) / 3, rtol=1e-5, atol=0)


@pytest.mark.parametrize("observer", [*MERGED_EXACTLY, *AVERAGED])
def test_merging_with_nothing_changes_nothing(observer: str) -> None:
    of = slot(observer)
    some = measure(of, torch.arange(8.0).reshape(2, 4))
    nothing = Statistics(
        slot=of, tensors=some.tensors, seen=torch.tensor(0), tokens=torch.tensor(0)
    )
    assert_same(merge(some, nothing), some)
    assert_same(merge(nothing, some), some)


@pytest.mark.parametrize("observer", [*MERGED_EXACTLY, *AVERAGED])
def test_qparams_are_those_of_the_observer(observer: str) -> None:
    of, value = slot(observer), torch.arange(12.0).reshape(3, 4) - 5
    found, expected = measure(of, value).qparams(), of.make_observer()(value).get_qparams()
    assert torch.equal(found["scale"], expected["scale"])
    assert torch.equal(found["zero_point"], expected["zero_point"])


def test_what_cannot_be_merged() -> None:
    value = torch.ones(2, 4)
    last = [measure(slot("memoryless_minmax"), value) for _ in range(2)]
    with pytest.raises(StatisticsError, match="of the last batch only"):
        merge(*last)
    with pytest.raises(StatisticsError, match="by other rules"):
        merge(measure(slot("minmax"), value), measure(slot("static_minmax"), value))


def test_values_stay_while_a_graph_goes_on() -> None:
    live = measure(slot("static_minmax"), torch.ones(2, 4))
    kept = live.current()
    live.tensors["max_vals"].fill_(7)
    live.seen.add_(1)
    assert float(kept.tensors["max_vals"]) == 1
    assert int(kept.seen) == 1
