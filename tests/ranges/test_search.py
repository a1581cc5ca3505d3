"""The range search in its three forms, held to its specification and to compressed-tensors."""

import itertools
import math
import re

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle import fake_quantize
from hypothesis import given
from hypothesis import strategies as st
from torch._inductor.utils import run_and_get_code
from torch.fx.experimental.proxy_tensor import make_fx

from inlay.observers import flatten_for_calibration
from inlay.observers.mse import shrink_factors
from inlay.ranges import candidates, kernels
from inlay.ranges import search as search_module
from inlay.ranges.powers import absolute_power, power_in_place
from inlay.ranges.qparams import qparams_of_range
from inlay.ranges.rounding import as_rounded, quantize_dequantize
from inlay.ranges.search import RangeSearch
from inlay.testing.strategies import CASES, FP8, INT4, INT8, NVFP4, make_args, observables

pytestmark = pytest.mark.slow

GROUP = {**INT4, "strategy": "group", "group_size": 32}


def weight_of(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)).to(dtype)


def searching(fields: dict, **changes: object) -> RangeSearch:
    settings = {"shrinks": shrink_factors(20, 40), "norm": 2.4, "patience": None, **changes}
    return RangeSearch(args=make_args(fields), **settings)


def precise_error(search: RangeSearch, observed: torch.Tensor, found, importance=None):
    """The error in float64 of values quantized in the dtype they have."""
    args = candidates.args_of_search(search.args)
    scale, zero_point = (part.unsqueeze(-1) for part in qparams_of_range(*found, args))
    per_row = args.model_copy(update={"strategy": "token"})
    quantized = fake_quantize(observed, scale, zero_point, per_row).to(observed.dtype)
    error = (quantized.double() - observed.double()).abs().pow(search.norm)
    return (error if importance is None else error * importance).sum(dim=(0, -1))


def assert_as_good(search: RangeSearch, observed, found, wanted, importance=None) -> None:
    ours = precise_error(search, observed, found, importance)
    theirs = precise_error(search, observed, wanted, importance)
    # What float32 cannot tell from zero, it cannot tell apart either.
    nothing = observed.double().abs().max() ** search.norm * 1e-12
    assert bool((ours <= theirs * (1 + 1e-6) + nothing).all())


@pytest.mark.parametrize("norm", [0.5, 1, 1.7, 2, 2.4, 2.5, 3, 3.4, 4, 7.3, 20])
def test_powers_are_those_of_pow(norm: float) -> None:
    values = torch.logspace(-6, 2, 4001) * torch.tensor([1.0, -1.0]).repeat(2001)[:4001]
    values = values[values.double().abs() ** norm > 1e-37]
    values = values[values.double().abs() ** norm < 1e38]
    wanted = values.double().abs() ** norm

    def inaccuracy(powers: torch.Tensor) -> float:
        return float((powers.double() / wanted - 1).abs().max())

    # pow itself rounds the exponent to float32, which shows where numbers are far from 1.
    assert inaccuracy(absolute_power(values, norm)) <= max(4e-7, inaccuracy(values.abs().pow(norm)))


@pytest.mark.parametrize("norm", [0.5, 1, 1.7, 2, 2.4, 3, 3.4, 7.3])
def test_powers_in_place_are_those_of_pow(norm: float) -> None:
    values = torch.cat([torch.zeros(1), torch.logspace(-5, 4, 4001)])
    wanted = values.double() ** norm
    seen = (wanted == 0) | ((wanted > 1e-37) & (wanted < 1e38))
    found = power_in_place(values.clone(), norm).double()
    torch.testing.assert_close(found[seen], wanted[seen], rtol=1e-6, atol=0)
    ends = power_in_place(torch.tensor([torch.inf, torch.nan]), norm)
    assert ends[0] == torch.inf
    assert ends[1].isnan()


@pytest.mark.parametrize("norm", [1, 2, 2.4, 2.5, 3, 3.4])
def test_powers_at_the_ends(norm: float) -> None:
    small = torch.tensor([0.0, -0.0, 1e-30])
    assert torch.equal(absolute_power(small, norm), small.abs().pow(norm))
    large = torch.tensor([1e38, torch.inf, -torch.inf, torch.nan])
    assert not bool(absolute_power(large, norm)[1:].isfinite().any())
    assert not bool((absolute_power(large, norm) < 0).any())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_is_that_of_the_dtype(dtype: torch.dtype) -> None:
    values = torch.cat([torch.randn(50_000) * 10.0**power for power in range(-9, 7)])
    # Halfway between neighbours, where ties go to even.
    middle = (
        values.to(dtype).float() + torch.nextafter(values.to(dtype), values.to(dtype) * 2)
    ) / 2
    ends = torch.tensor([0.0, -0.0, 65504, 65519.9, 65520, -65520, 1e-8, torch.inf, -torch.inf])
    for given_values in (values, middle.float(), ends):
        assert torch.equal(as_rounded(given_values, dtype), given_values.to(dtype).float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("case", [name for name in CASES if name.startswith("weight")])
def test_quantized_values_are_those_of_compressed_tensors(case: str, dtype: torch.dtype) -> None:
    args = candidates.args_of_search(
        make_args(
            CASES[case][1],
        )
    )
    weight = weight_of(24, 96, dtype)
    observed = flatten_for_calibration(weight, "weight", args)
    low, high = observed.amin(dim=(0, -1)) * 0.7, observed.amax(dim=(0, -1)) * 0.7
    scale, zero_point = (part.unsqueeze(-1) for part in qparams_of_range(low, high, args))
    per_row = args.model_copy(update={"strategy": "token"})
    wanted = fake_quantize(observed, scale, zero_point, per_row).to(dtype)
    wide = torch.promote_types(dtype, torch.float32)
    offset = None if args.symmetric else zero_point.to(wide)
    found = quantize_dequantize(observed.to(wide), scale.to(wide), offset, args, dtype)
    assert torch.equal(found, wanted.to(wide))


@pytest.mark.parametrize("bits", range(2, 9))
@given(st.integers(0, 2**20), st.booleans())
def test_halfway_values_round_alike(bits: int, numerator: int, is_float: bool) -> None:
    fields = {"num_bits": 8 if bits > 4 else 4, "type": "float"} if is_float else {"num_bits": bits}
    args = make_args(fields, strategy="channel")
    value = torch.tensor([numerator, -numerator]) / 2**11  # ties of every format are among these
    one = torch.ones(1)
    wanted = fake_quantize(value, one, torch.zeros(1), args)
    assert torch.equal(quantize_dequantize(value, one, None, args, torch.float32), wanted)


@given(
    st.lists(st.lists(st.integers(0, 3), min_size=7, max_size=7), min_size=1, max_size=3),
    st.one_of(st.none(), st.integers(1, 4)),
)
def test_patience_is_replayed(groups: list[list[int]], patience: int | None) -> None:
    errors = torch.tensor(groups).float()
    best, without_gain, tried = [9.0] * len(groups), 0, 0
    for candidate in range(7):
        tried += 1
        better = [group[candidate] < least for group, least in zip(groups, best, strict=True)]
        best = [min(group[candidate], least) for group, least in zip(groups, best, strict=True)]
        without_gain = 0 if any(better) else without_gain + 1
        if patience is not None and without_gain >= patience:
            break
    improving = candidates.improving(errors)
    assert int(candidates.tried_of(improving, patience).sum()) == tried
    assert torch.equal(candidates.first_best(errors), errors.argmin(-1))
    if patience is not None:  # it may say so in vain, but never miss it
        missed = bool((errors.argmin(-1) >= tried).any())
        assert search_module._may_stop_early(errors.argmin(-1), 7, patience) or not missed


@given(observables(), st.sampled_from([1.0, 2.0, 2.4, 3.0]), st.sampled_from([1.0, 1.5]))
def test_the_expression_finds_what_the_specification_finds(
    case, norm: float, expand: float
) -> None:
    base_name, args, value = case
    search = RangeSearch(args=args, shrinks=shrink_factors(12, 20), norm=norm, expand=expand)
    observed = flatten_for_calibration(value, base_name, args)
    found, wanted = search.expression(observed), search.specification(observed)
    assert [part.shape for part in found] == [part.shape for part in wanted]
    assert_as_good(search, observed, found, wanted)


@pytest.mark.parametrize("patience", [1, 3])
@pytest.mark.parametrize("case", CASES)
def test_patience_means_the_same_in_the_expression(case: str, patience: int) -> None:
    base_name, fields = CASES[case]
    shape = {"weight": (24, 96), "input": (3, 5, 96), "k": (2, 3, 5, 16)}[base_name]
    value = torch.randn(shape, generator=torch.Generator().manual_seed(4))
    search = searching(fields, shrinks=shrink_factors(19, 20), patience=patience, norm=3.0)
    observed = flatten_for_calibration(value, base_name, search.args)
    for found, wanted in zip(
        search.expression(observed), search.specification(observed), strict=True
    ):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("value", [0.0, torch.inf, torch.nan, 3e38])
def test_values_without_a_finite_error(value: float) -> None:
    observed = torch.full((1, 2, 1, 8), value)
    observed[0, 1] = torch.arange(8)
    search = searching({**INT8, "strategy": "channel"})
    for found, wanted in zip(
        search.expression(observed), search.specification(observed), strict=True
    ):
        assert torch.equal(found.nan_to_num(1.25), wanted.nan_to_num(1.25))


@pytest.mark.parametrize(
    ("fields", "dtype", "changes"),
    [
        (GROUP, torch.float32, {"patience": 5}),
        (GROUP, torch.float32, {"norm": 3.0, "shrinks": shrink_factors(20, 20), "patience": 5}),
        ({**GROUP, "symmetric": False}, torch.bfloat16, {"norm": 2.0}),
        (NVFP4, torch.bfloat16, {"norm": 2.0}),
        ({**FP8, "strategy": "tensor"}, torch.float32, {}),
        ({**INT8, "strategy": "channel"}, torch.float16, {"norm": 2.0}),
    ],
    ids=[
        "int4",
        "imatrix",
        "int4-asymmetric-bfloat16",
        "nvfp4-bfloat16",
        "fp8-tensor",
        "int8-float16",
    ],
)
def test_the_kernel_finds_what_the_specification_finds(
    fields: dict, dtype: torch.dtype, changes: dict, monkeypatch, request
) -> None:
    monkeypatch.setattr(search_module, "COMPILE_FROM", 0)
    search = searching(fields, **changes)
    weight = weight_of(512, 320, dtype)
    observed = flatten_for_calibration(weight, "weight", search.args)
    importance = None
    if "imatrix" in request.node.name:
        channels = torch.rand(320, generator=torch.Generator().manual_seed(2)) * 2
        importance = flatten_for_calibration(channels.expand(512, -1), "weight", search.args)
    found, wanted = search(observed, importance), search.specification(observed, importance)
    same = (found[0] == wanted[0]) & (found[1] == wanted[1])
    assert float(same.float().mean()) >= 0.999
    assert_as_good(search, observed, found, wanted, importance)

    monkeypatch.setattr(kernels, "_CHUNK", 20_000)  # several chunks decide together
    for whole, chunked in zip(found, search(observed, importance), strict=True):
        assert torch.equal(whole, chunked)


def test_one_kernel_serves_all_shapes(monkeypatch) -> None:
    monkeypatch.setattr(search_module, "COMPILE_FROM", 0)
    kernels.kernel_of.cache_clear()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    search = searching(GROUP, norm=2.0)
    for rows, columns in itertools.product((64, 96, 200), (64, 128, 320)):
        search(flatten_for_calibration(weight_of(rows, columns), "weight", search.args))
    compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert 1 <= compiled <= 2


def test_small_tensors_are_not_compiled() -> None:
    kernels.kernel_of.cache_clear()
    search = searching(GROUP)
    observed = flatten_for_calibration(weight_of(64, 64), "weight", search.args)
    for found, wanted in zip(search(observed), search.specification(observed), strict=True):
        assert torch.equal(found, wanted)
    assert kernels.kernel_of.cache_info().currsize == 0


def test_without_compilation_the_specification_runs(monkeypatch) -> None:
    monkeypatch.setattr(search_module, "COMPILE_FROM", 0)
    search = searching(GROUP)
    observed = flatten_for_calibration(weight_of(64, 64), "weight", search.args)
    with torch.compiler.set_stance("force_eager"):
        found = search(observed)
    for ours, wanted in zip(found, search.specification(observed), strict=True):
        assert torch.equal(ours, wanted)


def test_the_number_of_threads_does_not_matter(monkeypatch) -> None:
    monkeypatch.setattr(search_module, "COMPILE_FROM", 0)
    search = searching({**INT4, "strategy": "tensor"}, norm=2.0)  # sums over all of it
    observed = flatten_for_calibration(weight_of(512, 256), "weight", search.args)
    threads = torch.get_num_threads()
    found = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append(search(observed))
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        for ours, wanted in zip(found[0], other, strict=True):
            assert torch.equal(ours, wanted)


def normalized(x: torch.Tensor) -> torch.Tensor:
    """What a model computes before a linear layer, and might compute again for every candidate."""
    return torch.nn.functional.rms_norm(x + 1, x.shape[-1:]) * 2


@pytest.mark.parametrize(
    ("compiler", "dtype"),
    [
        ("aot_eager", torch.float32),
        ("inductor", torch.bfloat16),
    ],
)
def test_inline_it_finds_what_the_specification_finds(compiler: str, dtype: torch.dtype) -> None:
    args = QuantizationArgs(num_bits=8, strategy="tensor", symmetric=False)
    search = RangeSearch(args=args, shrinks=shrink_factors(20, 40), norm=2.4, patience=5)
    x = weight_of(48, 96, dtype).unsqueeze(1)
    search.specification(x)  # compressed-tensors caches its ranges

    def observed(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        value = normalized(x)
        return value, *search(value)

    graph = make_fx(observed, _allow_non_fake_inputs=True)(x)
    with kernels.keep_whole():
        (value, *found), code = run_and_get_code(torch.compile(graph, backend=compiler), x)
    assert_as_good(search, value, found, search.specification(value))
    # Nothing larger than the value is held: not what it is computed from, not its candidates.
    shapes = re.findall(r"empty_strided_cpu\(\((.*?)\)", "".join(code))
    assert bool(shapes) == (compiler == "inductor")
    assert all(math.prod(int(n) for n in re.findall(r"\d+", s)) <= x.numel() for s in shapes)
