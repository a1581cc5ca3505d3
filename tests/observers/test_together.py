"""Qparams of several observers asked together, held to those of each asked alone."""

from types import SimpleNamespace

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle import fake_quantize
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples

from inlay.errors import StatisticsError
from inlay.observers import HistogramObserver, Observer, QParamsDict
from inlay.ranges import clipping
from inlay.ranges.clipping import quantization_error
from inlay.ranges.float_histogram import Histogram
from inlay.ranges.qparams import qparams_of_range
from inlay.testing.strategies import integer_or_fp8_args, tensors

pytestmark = pytest.mark.slow

METHODS = ["mse", "percentile", "entropy", "minmax"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
INT8 = QuantizationArgs(num_bits=8, strategy="tensor")


def make(args: QuantizationArgs = INT8, base_name: str = "input", **kwargs: object) -> Observer:
    return Observer.load_from_registry("histogram", base_name=base_name, args=args, **kwargs)


def drawn(seed: int, count: int, scale: float = 1.0) -> torch.Tensor:
    """Values with as many used bins as their number allows, and some outliers."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(count, generator=generator) * scale
    values[:: max(2, count // 3)] *= 20
    return values


@st.composite
def values_of_slots(draw: st.DrawFn) -> list[torch.Tensor]:
    """What several slots see: a few plain numbers, or so many that they fill several blocks."""
    many = st.builds(drawn, st.integers(0, 99), st.integers(100, 6000), st.sampled_from([1.0, 1e3]))
    few = tensors((6,)) | st.just(torch.zeros(4)) | st.just(torch.tensor([-0.0, 3.0]))
    return draw(st.lists(few | many, min_size=1, max_size=5))


def assert_alone_and_together(observers: list[Observer]) -> None:
    together = list(type(observers[0]).get_qparams_of(observers))
    assert len(together) == len(observers)
    for observer, found in zip(observers, together, strict=True):
        wanted = alone(observer)
        if isinstance(wanted, StatisticsError) or isinstance(found, StatisticsError):
            assert (type(found), str(found)) == (type(wanted), str(wanted))
            continue
        for key, value in wanted.items():
            if value is None:
                assert found[key] is None
            else:
                assert found[key].shape == value.shape
                assert found[key].dtype == value.dtype
                assert torch.equal(found[key].double(), value.double()), key


def alone(observer: Observer) -> QParamsDict | StatisticsError:
    try:
        return observer.get_qparams()
    except StatisticsError as error:
        return error


@pytest.mark.parametrize("method", METHODS)
@examples(12)
@given(
    integer_or_fp8_args(strategy="tensor"),
    values_of_slots(),
    st.sampled_from(DTYPES),
    st.sampled_from([0.7, 2.0, 2.4]),
)
def test_each_finds_together_what_it_finds_alone(method: str, args, values, dtype, norm) -> None:
    observers = [make(args, method=method, grid=8, norm=norm)(v.to(dtype)) for v in values]
    assert_alone_and_together(observers)


@examples(10)
@given(st.lists(tensors((2, 3, 4, 5)), min_size=1, max_size=3), st.sampled_from(METHODS))
def test_heads_find_together_what_they_find_alone(values, method: str) -> None:
    args = QuantizationArgs(num_bits=8, strategy="attn_head")
    assert_alone_and_together([make(args, "k", method=method, grid=8)(v) for v in values])


def test_a_part_at_a_time_finds_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    observers = [make(grid=16)(drawn(seed, 500 + 900 * seed)) for seed in range(5)]
    whole = [found["scale"] for found in HistogramObserver.get_qparams_of(observers)]
    monkeypatch.setattr("inlay.observers.histogram._BINS_TOGETHER", 2 * make().bins.size)
    monkeypatch.setattr(clipping, "_TILE", 3)
    parts = [found["scale"] for found in HistogramObserver.get_qparams_of(observers)]
    assert all(map(torch.equal, whole, parts))


def test_different_ones_are_asked_as_they_are() -> None:
    wide = QuantizationArgs(num_bits=4, strategy="tensor", symmetric=False)
    assert_alone_and_together(
        [
            make(grid=8)(drawn(1, 300)),
            make(grid=8)(drawn(2, 300)),
            make(wide, grid=8)(drawn(3, 300)),
            make(method="percentile")(drawn(4, 300)),
            make(grid=8)(drawn(5, 300).bfloat16()),
            make(grid=8, mantissa_bits=5)(drawn(6, 300)),
        ]
    )


def test_errors_are_those_of_each() -> None:
    observers = [
        make(grid=8)(values)
        for values in (drawn(1, 50), torch.tensor([1.0, torch.nan]), torch.tensor([torch.inf]))
    ]
    observers += [make(grid=8), make(grid=8)(drawn(2, 50))]
    for number, observer in enumerate(observers):
        observer.slot = f"layer.{number}"
    assert_alone_and_together(observers)
    found = list(HistogramObserver.get_qparams_of(observers))
    broken = [str(part) for part in found if isinstance(part, StatisticsError)]
    assert [message.split(":")[0] for message in broken] == ["layer.1", "layer.2", "layer.3"]


def test_an_observer_that_chooses_otherwise_is_asked_alone() -> None:
    class Half(HistogramObserver):
        def _chosen_range(self):
            return self.min_vals / 2, self.max_vals / 2

    observers = [Half("input", INT8)(drawn(seed, 20)) for seed in range(2)]
    assert_alone_and_together(observers)
    minmax = make(method="minmax")(drawn(0, 20)).get_qparams()["scale"]
    assert torch.equal(next(Half.get_qparams_of(observers))["scale"] * 2, minmax)


@given(values_of_slots())
def test_other_observers_are_asked_one_by_one(values) -> None:
    observers = [
        Observer.load_from_registry("static_minmax", base_name="input", args=INT8)(value)
        for value in values
    ]
    assert_alone_and_together(observers)


def histograms(args, values, dtype) -> Histogram:
    # Statistics must be finite, also in float16.
    observers = [make(args)(value.clamp(-6e4, 6e4).to(dtype)) for value in values]
    return Histogram(
        observers[0].bins,
        *(
            torch.stack([getattr(observer, name) for observer in observers])
            for name in ("counts", "min_vals", "max_vals")
        ),
    )


def candidates_of(histogram: Histogram) -> tuple[torch.Tensor, torch.Tensor]:
    factors = torch.logspace(-4, 0, 9).reshape(-1, 1, 1)
    return tuple((end * factors).to(end.dtype) for end in (histogram.min_vals, histogram.max_vals))


@examples(40)
@given(integer_or_fp8_args(strategy="tensor"), values_of_slots(), st.sampled_from(DTYPES))
def test_values_too_small_to_matter_cost_what_they_would(args, values, dtype) -> None:
    """Leaving out blocks that become zero changes nothing but the order of float64 sums."""
    histogram = histograms(args, values, dtype)
    low, high = candidates_of(histogram)
    bound = torch.full_like(low[0], torch.inf, dtype=torch.float64)
    found = quantization_error(histogram, args, 2.4)(low, high, bound)
    with pytest.MonkeyPatch.context() as patch:
        seen = SimpleNamespace(grid=SimpleNamespace(smallest_step=0.0))
        patch.setattr(clipping, "format_of", lambda args: seen)
        whole = quantization_error(histogram, args, 2.4)(low, high, bound)
    torch.testing.assert_close(found, whole, rtol=1e-13, atol=0, equal_nan=True)


@examples(40)
@given(
    integer_or_fp8_args(strategy="tensor"),
    values_of_slots(),
    st.sampled_from(DTYPES),
    st.floats(0.5, 3),
)
def test_only_losses_above_the_bound_are_given_up(args, values, dtype, factor: float) -> None:
    histogram = histograms(args, values, dtype)
    loss = quantization_error(histogram, args, 2.4)
    low, high = candidates_of(histogram)
    whole = loss(low, high, torch.full_like(low[0], torch.inf, dtype=torch.float64))
    bound = whole.nan_to_num(torch.inf, torch.inf).amin(0) * factor
    expected = torch.where(whole > bound, torch.inf, whole)
    torch.testing.assert_close(loss(low, high, bound), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@examples(20)
@given(args=integer_or_fp8_args(strategy="tensor"), seed=st.integers(0, 99))
def test_the_loss_is_that_of_compressed_tensors(dtype: torch.dtype, args, seed: int) -> None:
    histogram = histograms(args, [drawn(seed, 3000)], dtype)
    low, high = candidates_of(histogram)
    bound = torch.full_like(low[0], torch.inf, dtype=torch.float64)
    found = quantization_error(histogram, args, 2.4)(low, high, bound)
    values, weights = histogram.points()
    scale, zero_point = (part.unsqueeze(-1) for part in qparams_of_range(low, high, args))
    per_row = args.model_copy(update={"strategy": "token"})
    quantized = fake_quantize(values.unsqueeze(0), scale, zero_point, per_row).to(dtype)
    wanted = ((quantized.double() - values.double()).abs() ** 2.4 * weights).sum(-1)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-30)
