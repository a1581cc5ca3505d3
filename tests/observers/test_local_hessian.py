"""`local_hessian_mse`: its range has the smallest output error among those that it tries."""

from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle import fake_quantize
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples

from inlay.errors import StatisticsError
from inlay.observers import Observer
from inlay.testing.strategies import FP8, INT4, MXFP4, Fields, make_args

FORMATS: dict[str, Fields] = {
    "int4": {**INT4, "strategy": "group", "group_size": 16},
    "int4-asymmetric": {**INT4, "strategy": "group", "group_size": 16, "symmetric": False},
    "int8": {"num_bits": 8, "type": "int", "strategy": "channel"},
    "int8-tensor": {"num_bits": 8, "type": "int", "strategy": "tensor"},
    "fp8-block": {**FP8, "strategy": "block", "block_structure": [4, 16]},
    "mxfp4": MXFP4,
}
ROWS, COLUMNS = 12, 96


def made(args: QuantizationArgs, **kwargs: Any) -> Observer:
    own = args.model_copy(update={"observer_kwargs": {"patience": 1000, **kwargs}})
    return Observer.load_from_registry("local_hessian_mse", base_name="weight", args=own)


def widths(args: QuantizationArgs) -> tuple[int, int]:
    """Rows and columns that share a scale."""
    if args.strategy == "block":
        return tuple(args.block_structure)
    if args.strategy in ("group", "tensor_group"):
        return 1, args.group_size
    return (1 if args.strategy == "channel" else ROWS), COLUMNS


def errors(weight: torch.Tensor, x: torch.Tensor, of: Observer) -> torch.Tensor:
    """The output error of each group by itself, from outputs in float64."""
    qparams = {key: value for key, value in of.get_qparams().items() if value is not None}
    rounded = fake_quantize(weight, args=of.args, **qparams)
    height, width = widths(of.args)
    # A block of the Hessian has 96 channels at most, so 96 columns are one.
    difference = (rounded - weight).double().unflatten(1, (-1, width))
    outputs = torch.einsum("rgc,tgc->rgt", difference, x.double().unflatten(1, (-1, width)))
    return outputs.square().sum(-1).unflatten(0, (-1, height)).sum(1)


@pytest.mark.parametrize("name", FORMATS)
@given(seed=st.integers(0, 2**20))
@examples(3)
def test_no_other_range_has_a_smaller_output_error(name: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    args = make_args(FORMATS[name])
    weight = torch.randn(ROWS, COLUMNS, generator=generator) ** 3
    x = torch.randn(50, 8, generator=generator) @ torch.randn(8, COLUMNS, generator=generator)
    of = made(args)
    of.observe_input(x[:20])
    of.observe_input(x[20:].reshape(3, 10, -1))
    of(weight)
    found = errors(weight, x, of)
    whole = Observer.load_from_registry("memoryless_minmax", base_name="weight", args=args)
    whole(weight)
    factors = (1.0, 0.5, 2.0) if name == "mxfp4" else [1 - step / 20 for step in range(11)]
    for factor in factors:
        of.min_vals, of.max_vals = whole.min_vals * factor, whole.max_vals * factor
        assert bool((found <= errors(weight, x, of) * (1 + 1e-4) + 1e-9).all()), factor


def test_neighbouring_exponents_are_tried() -> None:
    torch.manual_seed(0)
    args = make_args(MXFP4)
    weight, x = torch.randn(64, 64) ** 3, torch.randn(100, 64)
    of = made(args)
    plain = Observer.load_from_registry("memoryless_minmax", base_name="weight", args=args)
    of.observe_input(x)
    for observer in (of, plain):
        observer(weight)
    ratios = of.get_qparams()["scale"].float() / plain.get_qparams()["scale"].float()
    assert {1.0, 0.5} <= set(ratios.flatten().tolist()) <= {0.5, 1.0, 2.0}


def test_a_diagonal_hessian_weighs_channels() -> None:
    """Channels without any input have no say."""
    args = make_args({**INT4, "strategy": "group", "group_size": 4})
    weight = torch.tensor([[1.0, 0.5, 0.26, 8.0]])
    of = made(args, maxshrink=0.95)
    of.observe_input(torch.diag(torch.tensor([1.0, 1.0, 1.0, 0.0])))
    of(weight)
    assert float(of.max_vals) < 2


def test_padding_tokens_do_not_count() -> None:
    args = make_args({**INT4, "strategy": "channel"})
    x = torch.randn(6, 8)
    one, other = made(args), made(args)
    one.observe_input(x[:4])
    x[4:] = torch.nan
    other.observe_valid_input(x, torch.arange(6) < 4)
    assert torch.equal(one.blocks, other.blocks)


@pytest.mark.parametrize("name", ["int4", "int8", "fp8-block"])
def test_scaling_inputs_scales_the_hessian(name: str) -> None:
    args = make_args(FORMATS[name])
    x, scales = torch.randn(30, COLUMNS), torch.rand(COLUMNS) + 0.5
    plain, scaled = made(args), made(args)
    plain.observe_input(x)
    scaled.observe_input(x / scales)
    divided = type(plain).divide_input({"blocks": plain.blocks}, scales)["blocks"]
    torch.testing.assert_close(divided, scaled.blocks, rtol=1e-4, atol=1e-4)


def test_without_a_hessian_the_search_is_uniform() -> None:
    args = make_args(FORMATS["int4"])
    of = made(args)
    of.observe_input(torch.zeros(3, COLUMNS))
    with pytest.warns(UserWarning, match="without a Hessian: .*only zeros"):
        of(torch.randn(ROWS, COLUMNS))
    with pytest.raises(StatisticsError, match="strict=False accepts a uniform search"):
        made(args, strict=True)(torch.randn(ROWS, COLUMNS))
