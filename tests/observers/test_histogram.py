"""The observer that counts first and decides later."""

import copy

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle import fake_quantize
from hypothesis import given
from hypothesis import strategies as st
from llmcompressor.observers import Observer as PeerObserver
from profiles import examples
from torch._subclasses.fake_tensor import FakeTensorMode

from inlay.calibration.calibration import Calibration
from inlay.errors import ConfigurationError, StatisticsError
from inlay.observers import HistogramObserver, Observer, flatten_for_calibration
from inlay.ranges.float_histogram import FloatBins, Histogram
from inlay.ranges.qparams import qparams_of_range
from inlay.recipe import Recipe, Slot
from inlay.statistics.rule import Rule
from inlay.testing.strategies import (
    FP8,
    INT4,
    INT8,
    activations,
    batches,
    integer_or_fp8_args,
    tensors,
)

pytestmark = pytest.mark.slow

PER_TENSOR = QuantizationArgs(num_bits=8, strategy="tensor")
PER_HEAD = QuantizationArgs(num_bits=8, strategy="attn_head")
METHODS = ["mse", "percentile", "entropy", "minmax"]
STATISTICS = ("counts", "min_vals", "max_vals")


def make(
    base_name: str = "input", args: QuantizationArgs = PER_TENSOR, **kwargs: object
) -> HistogramObserver:
    of = Observer.load_from_registry("histogram", base_name=base_name, args=args, **kwargs)
    assert isinstance(of, HistogramObserver)
    return of


def assert_same_statistics(one: HistogramObserver, other: HistogramObserver) -> None:
    for name in STATISTICS:
        assert torch.equal(getattr(one, name), getattr(other, name)), name


@given(batches(), st.randoms())
def test_order_of_batches_does_not_matter(tensors_, random) -> None:
    straight, shuffled = make(), make()
    for tensor in tensors_:
        straight(tensor)
    random.shuffle(tensors_)
    for tensor in tensors_:
        shuffled(tensor)
    assert_same_statistics(straight, shuffled)


@given(batches(), batches())
def test_merging_two_equals_one_that_saw_both(ours, theirs) -> None:
    one, two, both = make(), make(), make()
    for of, seen in ((one, ours), (two, theirs), (both, ours + theirs)):
        for tensor in seen:
            of(tensor)
    one.counts = one.counts + two.counts
    one.min_vals = torch.minimum(one.min_vals, two.min_vals)
    one.max_vals = torch.maximum(one.max_vals, two.max_vals)
    assert_same_statistics(one, both)


@given(activations(4), st.integers(1, 4))
def test_repetition_scales_the_counts_and_nothing_else(tensor, times: int) -> None:
    once, often = make()(tensor), make()
    for _ in range(times):
        often(tensor)
    assert torch.equal(often.counts, once.counts * times)
    assert torch.equal(often.min_vals, once.min_vals)
    assert torch.equal(often.max_vals, once.max_vals)


@given(batches(), st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]))
def test_every_value_is_counted_once(tensors_, dtype: torch.dtype) -> None:
    of = make()
    for tensor in tensors_:
        of(tensor.to(dtype))
    assert int(of.counts.sum()) == sum(tensor.numel() for tensor in tensors_)


@given(tensors((2, 3, 4, 5)))
def test_every_head_has_its_own_histogram(value) -> None:
    of = make("k", PER_HEAD)(value)
    assert of.counts.shape == (3, 1, 1, of.bins.size)
    for head in range(3):
        alone = make()(value[:, head])
        assert torch.equal(of.counts[head, 0, 0], alone.counts[0])


@given(tensors((64,)), st.integers(0, 10))
def test_a_value_lies_in_its_bin(values, mantissa_bits: int) -> None:
    bins = FloatBins(mantissa_bits)
    inner, outer = bins.magnitudes(values.device)
    index = bins.index(values).long()
    magnitude, place = values.abs().double(), index % bins.per_sign
    assert torch.equal(index >= bins.per_sign, values.signbit())
    assert bool((inner[place] <= magnitude).all())
    assert bool((magnitude[place > 0] < outer[place[place > 0]]).all())
    assert bool((magnitude[place == 0] < 2**-32).all())


@pytest.mark.parametrize("method", METHODS)
@examples(20)
@given(args=integer_or_fp8_args(strategy="tensor"), tensors_=batches())
def test_the_range_is_inside_the_extremes(method: str, args, tensors_) -> None:
    of = make(args=args, method=method, grid=8)
    for tensor in tensors_:
        of(tensor)
    low, high = of.range()
    assert low.shape == high.shape == of.min_vals.shape
    assert low.dtype == of.min_vals.dtype
    assert bool((of.min_vals <= low).all())
    assert bool((low <= high).all())
    assert bool((high <= of.max_vals).all())
    assert bool((of.get_qparams()["scale"] > 0).all())


@given(integer_or_fp8_args(strategy="tensor"), batches())
def test_minmax_is_static_minmax(args, tensors_) -> None:
    of = make(args=args, method="minmax")
    static = Observer.load_from_registry("static_minmax", base_name="input", args=args)
    for tensor in tensors_:
        of(tensor)
        static(tensor)
    expected = static.get_qparams()
    for key, value in of.get_qparams().items():
        assert value is expected[key] or torch.equal(value.float(), expected[key].float())


@examples(20)
@given(batches(), st.sampled_from(METHODS), integer_or_fp8_args(strategy="tensor"))
def test_asking_differently_changes_nothing(tensors_, method: str, args) -> None:
    of = make(grid=8)
    for tensor in tensors_:
        of(tensor)
    before, first = copy.deepcopy(of), of.get_qparams()
    other = of.requantize(args, method=method)
    assert_same_statistics(of, before)
    assert of.method == "mse"
    assert torch.equal(of.get_qparams()["scale"], first["scale"])
    # The answer is that of an observer made for the question.
    asked = make(args=args, method=method, grid=8)
    for tensor in tensors_:
        asked(tensor)
    assert torch.equal(asked.get_qparams()["scale"].float(), other["scale"].float())


@examples(20)
@given(tensors((20,), scaled=False), st.floats(1, 100))
def test_percentile_leaves_out_what_it_says(values, percentile: float) -> None:
    of = make(method="percentile", percentile=percentile, mantissa_bits=10)(values)
    _, high = of.range()
    threshold = torch.maximum(high, -of.range()[0])
    inside = int((values.abs() <= threshold * 1.002).sum())
    assert inside >= percentile / 100 * len(values) - 1
    well_inside = int((values.abs() < threshold * 0.998).sum())
    assert well_inside <= percentile / 100 * len(values) + 1


@given(tensors((50,), scaled=False), st.floats(0, 1))
def test_quantiles_and_masses_are_inverse(values, fraction: float) -> None:
    of = make()(values)
    histogram = Histogram(of.bins, of.counts, of.min_vals, of.max_vals)
    at = histogram.quantile(fraction)
    below = float(histogram.mass_below(at.unsqueeze(-1)).squeeze())
    assert below >= fraction * len(values) - 1e-3 * len(values)
    smaller = at - at.abs() * 1e-3 - 1e-9
    before = float(histogram.mass_below(smaller.unsqueeze(-1)).squeeze())
    assert before <= fraction * len(values) + 1e-3 * len(values)


def samples(kind: str, count: int = 32_000) -> torch.Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(11)
        normal = torch.randn(count)
        drawn = {
            "normal": lambda: normal,
            "student": lambda: torch.distributions.StudentT(3.0).sample((count,)),
            "laplace": lambda: torch.distributions.Laplace(0.0, 1.0).sample((count,)),
            "outliers": lambda: torch.where(torch.rand(count) < 1e-3, normal * 60, normal),
            "silu": lambda: torch.nn.functional.silu(normal * 3),
        }[kind]()
    return drawn.reshape(8, -1)


def true_error(values: torch.Tensor, low, high, args: QuantizationArgs) -> torch.Tensor:
    """The error over all values, for each of a list of ranges."""
    per_row = args.model_copy(update={"strategy": "token"})
    errors = []
    for own_low, own_high in zip(low.split(16), high.split(16), strict=True):
        scale, zero_point = qparams_of_range(own_low.unsqueeze(-1), own_high.unsqueeze(-1), args)
        quantized = fake_quantize(values.reshape(1, -1), scale, zero_point, per_row)
        difference = quantized.float() - values.float().reshape(1, -1)
        errors.append(difference.abs().pow(2.4).sum(-1))
    return torch.cat(errors)


def exhaustive(values: torch.Tensor, args: QuantizationArgs) -> float:
    """The smallest error of all ranges on a grid, and on a finer one around the best of them."""
    low, high = values.min(), values.max()
    if args.symmetric:
        thresholds = torch.maximum(-low, high) * torch.logspace(-2, 0, 250).to(values.dtype)
        return float(true_error(values, -thresholds, thresholds, args).min())
    factors = torch.logspace(-1.6, 0, 16).to(values.dtype)
    best, _ = best_pair(values, low * factors, high * factors, args)
    fine = torch.logspace(-0.1, 0.1, 13).to(values.dtype)
    return best_pair(values, best[0] * fine, best[1] * fine, args)[1]


def best_pair(values, lows, highs, args: QuantizationArgs) -> tuple[torch.Tensor, float]:
    pairs = torch.cartesian_prod(lows, highs)
    errors = true_error(values, pairs[:, 0], pairs[:, 1], args)
    return pairs[errors.argmin()], float(errors.min())


FORMATS = {
    "int8": {**INT8, "symmetric": True},
    "int8-asymmetric": {**INT8, "symmetric": False},
    "int4": {**INT4, "symmetric": True},
    "int4-asymmetric": {**INT4, "symmetric": False},
    "fp8": FP8,
}


@pytest.mark.parametrize("kind", ["normal", "student", "laplace", "outliers", "silu"])
@pytest.mark.parametrize("name", FORMATS)
def test_mse_is_as_good_as_an_exhaustive_search_over_all_data(kind: str, name: str) -> None:
    values, args = samples(kind), QuantizationArgs(strategy="tensor", **FORMATS[name])
    of = make(args=args)
    peer = PeerObserver.load_from_registry("mse", base_name="input", args=args.model_copy())
    for batch in values:
        of(batch)
        peer(batch)
    error, of_peer, of_static = (
        float(true_error(values, low, high, args))
        for low, high in (of.range(), (peer.min_vals, peer.max_vals), (of.min_vals, of.max_vals))
    )
    assert error <= exhaustive(values, args) * 1.01
    assert error <= of_peer * 1.001
    assert error <= of_static * 1.001


@pytest.mark.parametrize("symmetric", [True, False])
def test_mse_of_bfloat16(symmetric: bool) -> None:
    args = QuantizationArgs(num_bits=8, strategy="tensor", symmetric=symmetric)
    values = samples("laplace").bfloat16()
    low, high = make(args=args)(values).range()
    assert low.dtype == torch.bfloat16
    # The error is that of arithmetic in bfloat16, in which the value is quantized.
    assert float(true_error(values, low, high, args)) <= exhaustive(values, args) * 1.01


@pytest.mark.parametrize("symmetric", [True, False])
def test_entropy_cuts_off_rare_outliers(symmetric: bool) -> None:
    args = QuantizationArgs(num_bits=8, strategy="tensor", symmetric=symmetric)
    values = samples("normal").clone()
    values[0, :3] = torch.tensor([300.0, -280.0, 250.0])
    low, high = make(args=args, method="entropy")(values).range()
    assert 3 < float(high) < 30
    assert -30 < float(low) < -3


def test_heads_are_searched_each_by_itself() -> None:
    value = (
        samples("laplace", 6000).reshape(2, 3, 20, 50) * torch.tensor([1.0, 10, 0.1])[:, None, None]
    )
    for method in METHODS:
        low, high = make("v", PER_HEAD, method=method, grid=32)(value).range()
        assert low.shape == high.shape == (3, 1, 1)
        for head in range(3):
            own_low, own_high = make(method=method, grid=32)(value[:, head]).range()
            torch.testing.assert_close(high[head, 0], own_high, rtol=0.05, atol=0)
            torch.testing.assert_close(low[head, 0], own_low, rtol=0.05, atol=0)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    "value", [[0.0, 0.0], [-0.0], [3.0], [-3.0, -3.0], [5.0, 6.0], [-6.0, -5.0], [1e30, -1e30]]
)
def test_values_without_much_of_a_distribution(method: str, symmetric: bool, value) -> None:
    args = QuantizationArgs(num_bits=8, strategy="tensor", symmetric=symmetric)
    qparams = make(args=args, method=method, grid=8)(torch.tensor(value)).get_qparams()
    assert bool(torch.isfinite(qparams["scale"]).all())
    assert bool((qparams["scale"] > 0).all())


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_values_that_are_not_finite_are_counted_and_refused(bad: float) -> None:
    of = make()(torch.tensor([1.0, bad]))(torch.tensor([1.0, 2.0]))
    assert int(of.counts.sum()) == 4
    for ask in (of.get_qparams, of.range, of.requantize):
        with pytest.raises(StatisticsError, match="not finite"):
            ask()


def test_a_range_too_wide_for_its_dtype_is_refused() -> None:
    args = QuantizationArgs(num_bits=8, strategy="tensor", symmetric=False)
    with pytest.raises(StatisticsError, match="too wide"):
        make(args=args, method="minmax")(torch.tensor([-3e38, 3e38])).get_qparams()


def test_float64_beyond_float32_is_counted() -> None:
    of = make()(torch.tensor([1e300, -1e300, 1e-300], dtype=torch.float64))
    assert int(of.counts.sum()) == 3
    assert float(of.max_vals) == 1e300


@pytest.mark.parametrize(
    ("base_name", "fields", "message"),
    [
        ("weight", {"strategy": "channel"}, "channel; use tensor$"),
        ("input", {"strategy": "token", "dynamic": True}, "token; use tensor$"),
        ("input", {"strategy": "group", "group_size": 4}, "group; use tensor$"),
        ("weight", {"strategy": "attn_head"}, "attn_head; use tensor$"),
        ("k", {"strategy": "group", "group_size": 4}, "group; use tensor, attn_head$"),
    ],
)
def test_other_strategies_are_refused(base_name: str, fields: dict, message: str) -> None:
    with pytest.raises(ConfigurationError, match=f"histogram does not work with .*{message}"):
        make(base_name, QuantizationArgs(**fields))


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("method", "median"),
        ("method", 3),
        ("percentile", 0),
        ("percentile", 101),
        ("norm", 0),
        ("grid", 4),
        ("grid", 32.5),
        ("mantissa_bits", 11),
        ("mantissa_bits", True),
    ],
)
def test_settings_out_of_range_are_refused(setting: str, value: object) -> None:
    with pytest.raises(ConfigurationError, match=f"{setting} must be"):
        make(**{setting: value})


def test_questions_that_cannot_be_answered() -> None:
    of = make()(torch.randn(8))
    with pytest.raises(ConfigurationError, match="method must be one of mse, percentile"):
        of.range(method="best")
    with pytest.raises(ConfigurationError, match=r"does not take .*mantissa_bits"):
        of.requantize(mantissa_bits=3)
    with pytest.raises(ConfigurationError, match=r"counted for strategy tensor.*attn_head"):
        of.requantize(PER_HEAD)
    with pytest.raises(StatisticsError, match="no statistics"):
        make().range()


def rule(base_name: str, args: QuantizationArgs) -> Rule:
    named = args.model_copy(update={"observer": "histogram"})
    return Rule(Slot("layer", base_name, named))


@pytest.mark.parametrize(
    ("base_name", "args", "shape", "counts"),
    [("input", PER_TENSOR, (2, 5, 8), (1,)), ("k", PER_HEAD, (2, 4, 5, 8), (4, 1, 1))],
)
def test_it_is_traced_without_data(base_name, args, shape, counts) -> None:
    with FakeTensorMode():
        value = torch.empty(shape)
    specs = {spec.name: spec for spec in rule(base_name, args).specs(value)}
    assert sorted(specs) == sorted(STATISTICS)
    assert specs["counts"].shape == (*counts, make().bins.size)
    assert specs["counts"].dtype == torch.int64


class Block(torch.nn.Module):
    """Returns what its layer is given, so that an eager observer can be shown the same."""

    def __init__(self) -> None:
        super().__init__()
        self.down = torch.nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.nn.functional.silu(x * 1.7)
        return self.down(hidden), hidden


def test_heads_are_counted_compiled_as_they_are_eagerly() -> None:
    key = torch.randn(2, 4, 5, 8)
    eager = make("k", PER_HEAD)(key * 2)

    @torch.compile
    def counted(key: torch.Tensor) -> torch.Tensor:
        return eager.bins.count(flatten_for_calibration(key * 2, "k", PER_HEAD))

    assert torch.equal(counted(key), eager.counts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_statistics_are_the_eager_ones(dtype: torch.dtype) -> None:
    model = Block().to(dtype).requires_grad_(False)
    recipe = Recipe.from_preset("W8A8_STATIC", inputs={"observer": "histogram"})
    calibration = Calibration(model, recipe)
    compiled = torch.compile(model, backend=calibration.backend)
    eager = make(args=recipe.config.config_groups["group_0"].input_activations)
    for seed in range(3):
        x = torch.randn(6, 16, generator=torch.Generator().manual_seed(seed)).to(dtype)
        eager(compiled(x)[1])
    with torch.profiler.profile() as profile:
        eager(compiled(x)[1])
    calls = {event.key: event.count for event in profile.key_averages()}
    assert calls["inlay::count"] == 2  # once compiled and once eager
    state = calibration.statistics.snapshot()["down.input"]
    assert state.live is None, "it was not traced"
    assert_same_statistics(state.observer(), eager)
    scale = calibration.finalize()["down.input"]["scale"]
    assert torch.equal(scale, eager.get_qparams()["scale"])
