"""The table agrees with compressed-tensors, which owns the numbers."""

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle import fake_quantize
from hypothesis import given
from hypothesis import strategies as st

from inlay import ConfigurationError
from inlay.formats.numbers import FORMATS, FloatGrid, format_of
from inlay.observers import Observer, flatten_for_calibration
from inlay.ranges.rounding import format_range, quantize_dequantize
from inlay.testing.strategies import MXFP4, MXFP8, NVFP4, tensors

# Any dtype: compressed-tensors knows none of its own for FP4.
ZERO_POINTS = {"zp_dtype": torch.float8_e4m3fn}


def args_of(kind: str, bits: int, **fields: object) -> QuantizationArgs:
    extra = ZERO_POINTS if kind == "float" else {}
    return QuantizationArgs(type=kind, num_bits=bits, strategy="token", dynamic=True, **extra)


@pytest.mark.parametrize(("kind", "bits"), FORMATS)
@given(
    data=st.data(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    power=st.integers(-12, 3),
)
def test_every_format_rounds_as_compressed_tensors_does(
    kind: str, bits: int, data: st.DataObject, dtype: torch.dtype, power: int
) -> None:
    args = args_of(kind, bits)
    value = data.draw(tensors((3, 8), dtype))
    scale = torch.full((3, 1), 2.0**power, dtype=dtype)
    expected = fake_quantize(value, scale, None, args)
    found = quantize_dequantize(value.float(), scale.float(), None, args, dtype)
    assert torch.equal(found.to(dtype), expected)


@pytest.mark.parametrize(("kind", "bits"), FORMATS)
def test_grids_reach_as_far_and_are_as_fine(kind: str, bits: int) -> None:
    args = args_of(kind, bits)
    grid, (low, high) = format_of(args).grid, format_range(args)
    if isinstance(grid, FloatGrid):
        assert (-low, high) == (grid.largest, grid.largest)
    else:
        assert high - low == grid.steps
    one = torch.ones(1, 1)
    smallest = one * grid.smallest_step
    assert torch.equal(fake_quantize(smallest, one, None, args), smallest)
    assert not fake_quantize(smallest * 0.49, one, None, args).any()


@pytest.mark.parametrize("fields", [NVFP4, MXFP4, MXFP8], ids=["nvfp4", "mxfp4", "mxfp8"])
@given(value=tensors((4, 64)))
def test_formats_of_groups_round_as_compressed_tensors_does(
    fields: dict[str, object], value: torch.Tensor
) -> None:
    args = QuantizationArgs(**fields)
    qparams = Observer.load_from_registry("memoryless_minmax", base_name="weight", args=args)(
        value
    ).get_qparams()
    scale, shared = qparams["scale"], qparams.get("global_scale")
    expected = fake_quantize(value, scale, qparams["zero_point"], args, global_scale=shared)
    groups = flatten_for_calibration(value, "weight", args)[0]
    scale = scale if shared is None else scale / shared
    found = quantize_dequantize(groups, scale.unsqueeze(-1), None, args, value.dtype)
    assert torch.equal(found.reshape(value.shape), expected)


@pytest.mark.parametrize(("kind", "bits"), [key for key in FORMATS if key[0] == "float"])
@pytest.mark.parametrize("size", [300.0, 1.0, 0.02, 1e-3])
def test_estimated_errors_are_those_of_rounding(kind: str, bits: int, size: float) -> None:
    """Of values spread over an octave, for sizes above, at and below the smallest normal."""
    args = args_of(kind, bits)
    grid = format_of(args).grid
    assert isinstance(grid, FloatGrid)
    scale = torch.tensor(size / grid.largest * 4)
    for at in (size, size / 8):
        values = at * torch.exp2(torch.linspace(-0.5, 0.5, 4096)).unsqueeze(0)
        error = fake_quantize(values, scale.reshape(1, 1), None, args) - values
        estimate = grid.squared_steps(values, scale).mean() / 12
        assert 0.4 < float(error.square().mean() / estimate) < 2.0


@pytest.mark.parametrize(("kind", "bits"), [("float", 7), ("float", 5), ("int", 1), ("int", 16)])
def test_an_unknown_format_is_refused_by_name(kind: str, bits: int) -> None:
    with pytest.raises(ConfigurationError, match=f"no number format {kind}{bits}; .* int4, .* fl"):
        format_of(args_of(kind, bits))
