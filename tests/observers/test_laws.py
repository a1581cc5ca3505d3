"""What holds for all values, shown with Hypothesis."""

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle import fake_quantize
from compressed_tensors.quantization.utils import calculate_range
from hypothesis import given
from hypothesis import strategies as st
from profiles import count

from inlay.observers import Observer, flatten_for_calibration, lerp
from inlay.testing import Check, parametrize_with_checks
from inlay.testing.strategies import (
    NVFP4,
    batches,
    integer_or_fp8_args,
    observables,
    tensors,
    weights,
)

BUILT_IN = [
    name.replace("-", "_")
    for name in sorted(Observer.registered_names())
    if Observer.get_value_from_registry(name).__module__.startswith("inlay.")
]
MIN_MAX = [name for name in BUILT_IN if name.endswith("minmax")]
# One name for each of those that search: another name of the same search has its laws, too.
SEARCHING = [name for name in BUILT_IN if name not in (*MIN_MAX, "fouroversix")]


@pytest.mark.hypothesis
@parametrize_with_checks(MIN_MAX, examples=count(8))
def test_built_in_observers_keep_every_law(check: Check) -> None:
    check()


@pytest.mark.slow
@pytest.mark.hypothesis
@pytest.mark.filterwarnings("ignore:.*_mse searches without")
@parametrize_with_checks(SEARCHING, examples=count(8))
def test_searching_observers_keep_every_law(check: Check) -> None:
    check()


def observer(name: str, base_name: str, args: QuantizationArgs, **kwargs: object) -> Observer:
    return Observer.load_from_registry(name, base_name=base_name, args=args, **kwargs)


def ranges(of: Observer) -> list[torch.Tensor]:
    return [of.min_vals, of.max_vals]


def assert_same_ranges(one: Observer, other: Observer) -> None:
    for own, theirs in zip(ranges(one), ranges(other), strict=True):
        assert torch.equal(own, theirs)


@given(observables())
def test_flattening_counts_every_element_once(case) -> None:
    base_name, args, value = case
    numbered = torch.arange(1.0, value.numel() + 1).reshape(value.shape)
    flat = flatten_for_calibration(numbered, base_name, args).flatten().sort().values
    padding = flat.numel() - value.numel()
    assert torch.equal(flat, torch.cat([torch.zeros(padding), numbered.flatten()]))
    assert padding == 0 or args.strategy == "block"


@given(
    st.builds(
        lambda bits, symmetric: QuantizationArgs(
            num_bits=bits, strategy="tensor", symmetric=symmetric
        ),
        st.integers(2, 8),
        st.booleans(),
    ),
    tensors(),
)
def test_round_trip_is_within_half_a_scale(args, value) -> None:
    qparams = observer("memoryless_minmax", "weight", args)(value).get_qparams()
    scale, zero_point = qparams["scale"], qparams["zero_point"]
    restored = fake_quantize(value, scale, zero_point, args)
    low, high = calculate_range(args, value.device)
    inside = (value >= (low - zero_point) * scale) & (value <= (high - zero_point) * scale)
    error = (restored - value).abs()[inside]
    # Half a scale, and the rounding of the float32 arithmetic that computes it.
    slack = value.abs().max() * torch.finfo(torch.float32).eps * 4
    assert bool((error <= scale / 2 + slack).all())


@pytest.mark.filterwarnings("ignore:imatrix_mse searches without importance")
@pytest.mark.parametrize("name", ["memoryless_mse", "imatrix_mse"])
@given(case=observables(), norm=st.sampled_from([1.0, 2.0, 2.4, 3.0]))
def test_searched_range_is_never_worse_than_the_full_one(name: str, case, norm: float) -> None:
    base_name, args, value = case
    searching = observer(name, base_name, args, norm=norm)(value)
    full = observer("memoryless_minmax", base_name, args)(value)
    observed = flatten_for_calibration(value, base_name, args)
    best = searching.search.error(observed, *ranges(searching))
    whole = searching.search.error(observed, *ranges(full))
    assert bool((best <= whole).all())


@given(
    weights(8),
    # Few bits, so that the mean of equal numbers is that number exactly.
    st.integers(1, 100).map(lambda eighths: eighths / 8),
    st.sampled_from(["channel", "group"]),
)
def test_uniform_importance_equals_no_importance(weight, importance: float, strategy: str) -> None:
    args = QuantizationArgs(
        num_bits=4, strategy=strategy, group_size=4 if strategy == "group" else None
    )
    weighted = observer("imatrix_mse", "weight", args, strict=True)
    weighted._imatrix_sum = torch.full((8,), importance * 4)
    weighted._imatrix_count = torch.tensor(4)
    with pytest.warns(UserWarning, match="without importance"):
        plain = observer("imatrix_mse", "weight", args)(weight)
    assert_same_ranges(weighted(weight), plain)


@given(weights(16), st.integers(2, 15), st.data())
def test_unimportant_channels_do_not_count(weight, kept: int, data) -> None:
    """What lies in a channel of importance zero has no say, as long as the range is the same."""
    args = QuantizationArgs(num_bits=4, strategy="channel")
    # The extremes of each row lie in channels that count, so that others can change freely.
    weight[:, 0], weight[:, 1] = weight.amin(-1), weight.amax(-1)
    low, high = weight[:, :1], weight[:, 1:2]
    changed = weight.clone()
    places = data.draw(tensors((len(weight), 16 - kept), scaled=False)) / 8 + 0.5  # from 0 to 1
    changed[:, kept:] = (low + (high - low) * places).clamp(low, high)
    found = []
    for value in (weight, changed):
        of = observer("imatrix_mse", "weight", args, strict=True)
        of._imatrix_sum = (torch.arange(16) < kept).float()
        of._imatrix_count = torch.tensor(1)
        found.append(of(value))
    assert_same_ranges(*found)


@given(st.lists(weights(16), min_size=2, max_size=4), st.randoms())
def test_fused_observers_share_a_global_scale_in_any_order(members, random) -> None:
    args = QuantizationArgs(**NVFP4)
    group = [observer("memoryless_minmax", "weight", args) for _ in members]
    Observer.fuse(group)
    for of, weight in zip(group, members, strict=True):
        of(weight)
    random.shuffle(group)
    scales = [of.get_qparams()["global_scale"] for of in group]
    largest = max(float(weight.abs().max()) for weight in members)
    for scale in scales:
        assert scale is not None
        assert torch.equal(scale, scales[0])
    if largest > 1e-20:
        alone = observer("memoryless_minmax", "weight", args)(torch.full((1, 16), largest))
        assert torch.equal(scales[0], alone.get_qparams()["global_scale"])


@given(integer_or_fp8_args(strategy="tensor"), batches(), st.floats(0.0, 1.0))
def test_moving_average_stays_between_the_extremes(args, tensors_, constant: float) -> None:
    of = observer("minmax", "input", args, averaging_constant=constant)
    for tensor in tensors_:
        of(tensor)
    lows = torch.stack([tensor.amin() for tensor in tensors_])
    highs = torch.stack([tensor.amax() for tensor in tensors_])
    slack = torch.stack([tensor.abs().amax() for tensor in tensors_]).max() * 1e-5
    assert float(lows.min() - slack) <= float(of.min_vals) <= float(lows.max() + slack)
    assert float(highs.min() - slack) <= float(of.max_vals) <= float(highs.max() + slack)


@given(tensors((3,)), tensors((3,)))
def test_lerp_meets_its_ends(start, end) -> None:
    assert torch.equal(lerp(start, end, 0.0), start)
    assert torch.equal(lerp(start, end, 1.0), end)
