"""Scales of channels, from ranges and weights alone."""

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from hypothesis import given
from hypothesis import strategies as st

from inlay.equalization.group import Group, Producer
from inlay.equalization.scales import Channels, Reader, Scales, _error, scales_of
from inlay.nodes.quantize import fold_weight
from inlay.recipe import make_observer
from inlay.testing.strategies import MXFP4, MXFP8, NVFP4

CHANNELS = 12
INT8 = QuantizationArgs(num_bits=8)


def lists_of(values: st.SearchStrategy[float]) -> st.SearchStrategy[torch.Tensor]:
    return st.lists(values, min_size=CHANNELS, max_size=CHANNELS).map(
        lambda chosen: torch.tensor(chosen, dtype=torch.float64)
    )


# Far enough apart to matter, and not so far that a channel is silent beside another one.
sizes = lists_of(st.floats(0.5, 100))
# All that float32 can hold, and channels that data never reached or nothing reads.
any_sizes = lists_of(st.one_of(st.just(0.0), st.floats(-37, 37).map(lambda power: 10**power)))
groups = st.sampled_from(
    [
        Group(readers=("a",), producers=(), shape=(CHANNELS,)),
        Group(readers=("a",), producers=(), shape=(3, 2, 2), tied=(1,)),
    ]
)


def reader(weight: torch.Tensor) -> Reader:
    return Reader(weight=weight, weight_args=INT8, input_args=INT8)


def weight(columns: torch.Tensor) -> torch.Tensor:
    return torch.stack([columns, -0.5 * columns])


def scales(
    group: Group,
    low: torch.Tensor,
    high: torch.Tensor,
    readers: list[Reader],
    strength: float | str,
    *,
    means: torch.Tensor | None = None,
) -> Scales:
    channels = Channels(low=low, high=high, means=high / 3 if means is None else means)
    return scales_of(group, channels, readers, strength)


@given(group=groups, high=any_sizes, columns=any_sizes, strength=st.floats(0, 1))
def test_equalizing_again_with_the_same_strength_changes_nothing(
    group: Group, high: torch.Tensor, columns: torch.Tensor, strength: float
) -> None:
    first = scales(group, -high / 2, high, [reader(weight(columns))], strength).values
    again = [reader(weight(columns) * first)]
    second = scales(group, -high / first / 2, high / first, again, strength).values
    torch.testing.assert_close(second, torch.ones_like(second), rtol=1e-9, atol=0)


@given(group=groups, high=any_sizes, columns=any_sizes, strength=st.floats(0, 1))
def test_silent_channels_are_never_larger_than_channels_that_count(
    group: Group, high: torch.Tensor, columns: torch.Tensor, strength: float
) -> None:
    found = scales(group, -high / 2, high, [reader(weight(columns))], strength).values
    assert found.isfinite().all()
    assert (found > 0).all()
    high, columns = group.tie(high), group.tie(columns)
    product = high * columns
    if not product.any():
        return
    loudest = product.argmax()
    # Nothing is lost in the quantized weights, or in the quantized value, for channels that do
    # not matter: the one that matters most stays the largest of both.
    for each in (high / found, columns * found):
        assert (each <= each[loudest] * (1 + 1e-9)).all()
    counts = product >= product.amax() * 1e-5
    expected = high**strength / columns ** (1 - strength)
    torch.testing.assert_close(found[counts], expected[counts], rtol=1e-9, atol=0)


@given(group=groups, high=sizes, columns=sizes)
def test_what_the_ends_of_the_scale_mean(
    group: Group, high: torch.Tensor, columns: torch.Tensor
) -> None:
    readers = [reader(weight(columns))]
    all_of_it = scales(group, -high, high, readers, 1.0).values
    torch.testing.assert_close(group.tie(high) / all_of_it, torch.ones_like(high))
    none_of_it = scales(group, -high, high, readers, 0.0).values
    torch.testing.assert_close(group.tie(columns) * none_of_it, torch.ones_like(high))


INPUTS = {"int8": INT8, "float8": QuantizationArgs(type="float", num_bits=8)}
WEIGHTS = {
    "int8": QuantizationArgs(num_bits=8, strategy="channel"),
    "float8": QuantizationArgs(type="float", num_bits=8),
    "float8 by channel": QuantizationArgs(type="float", num_bits=8, strategy="channel"),
    "mxfp8": QuantizationArgs(**MXFP8),
    "mxfp4": QuantizationArgs(**MXFP4),
    "nvfp4": QuantizationArgs(**NVFP4),
}


@pytest.mark.parametrize("outlier", [1.0, 20.0])
@pytest.mark.parametrize("kind", [*INPUTS, *WEIGHTS])
def test_the_estimated_error_is_that_of_quantizing(kind: str, outlier: float) -> None:
    """Floating-point formats keep small values beside an outlier, integers do not."""
    torch.manual_seed(0)
    rows, value = torch.randn(64, 256), torch.randn(512, 256).sign() + torch.rand(512, 256) / 4
    value[:, 0] *= outlier
    channels = Channels(low=value.amin(0), high=value.amax(0), means=value.abs().mean(0))
    for name, table in (("input", INPUTS), ("weight", WEIGHTS)):
        args = table.get(kind)
        if args is None:
            continue
        observed, other = (value, rows) if name == "input" else (rows, value)
        given = {"weight_args": None, "input_args": None, f"{name}_args": args}
        estimate = _error(channels, [Reader(weight=rows, **given)], torch.ones(256)) / 12
        quantized = fold_weight(observed, args, make_observer(name, args)(observed).get_qparams())
        squared = (quantized - observed).square()
        squared = squared.sum(0) if name == "weight" else squared.mean(0)
        other = other.square().sum(0) if name == "input" else other.square().mean(0)
        assert 0.3 < estimate / float((squared * other).sum()) < 3


@given(high=sizes, columns=sizes)
def test_tied_channels_have_one_scale(high: torch.Tensor, columns: torch.Tensor) -> None:
    producer = Producer(parameter="v", axes=(0, 2))
    group = Group(readers=("a",), producers=(producer,), shape=(3, 2, 2), tied=(1,))
    found = scales(group, -high, high, [reader(weight(columns))], 0.6).values.reshape(3, 2, 2)
    assert torch.equal(found[:, 0], found[:, 1])
    assert torch.equal(group.scale_of(producer, found.flatten()), found[:, 0].flatten())


@given(high=sizes, columns=sizes, outlier=st.integers(0, CHANNELS - 1))
def test_auto_brings_down_outliers(high: torch.Tensor, columns: torch.Tensor, outlier: int) -> None:
    group = Group(readers=("a",), producers=(), shape=(CHANNELS,))
    high[outlier] = 1e4
    found = scales(group, -high, high, [reader(weight(columns))], "auto")
    assert 0.5 <= found.strength <= 0.8
    assert (high / found.values).amax() / (
        high / found.values
    ).median() < high.amax() / high.median()


def test_channels_that_are_always_zero_keep_scales_finite() -> None:
    group = Group(readers=("a",), producers=(), shape=(3,))
    zero, columns = torch.zeros(3), torch.tensor([[0.0, 1.0, 2.0]])
    for strength in (0.0, 0.5, 1.0, "auto"):
        for high in (zero, torch.tensor([0.0, 1.0, 5.0])):
            found = scales(group, -high, high, [reader(columns)], strength).values
            assert found.isfinite().all()
            assert (found > 0).all()


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_groups_go_through_json(offset: float) -> None:
    group = Group(
        readers=("a", "b"),
        producers=(Producer(parameter="norm.weight", axes=(0,), offset=offset),),
        shape=(4,),
    )
    assert Group.from_plain(group.to_plain()) == group


@given(high=sizes, columns=sizes)
def test_auto_spares_the_weights_where_what_they_read_is_large(
    high: torch.Tensor, columns: torch.Tensor
) -> None:
    """The larger typical values are, the more errors of weights count, and the less is moved."""
    group = Group(readers=("a",), producers=(), shape=(CHANNELS,))

    def chosen(part: float) -> float:
        readers = [reader(weight(columns))]
        return scales(group, -high, high, readers, "auto", means=high * part).strength

    assert chosen(1e-6) >= chosen(0.1) >= chosen(1.0)


@given(high=sizes, columns=sizes, part=st.floats(0.01, 0.9))
def test_auto_divides_channels_by_less_that_seldom_reach_so_far(
    high: torch.Tensor, columns: torch.Tensor, part: float
) -> None:
    group = Group(readers=("a",), producers=(), shape=(CHANNELS,))
    high[1], columns[1] = high[0], columns[0]
    means = high / 3
    means[1] *= part
    found = scales(group, -high, high, [reader(weight(columns))], "auto", means=means)
    expected = part ** (0.25 * found.strength)
    assert float(found.values[1] / found.values[0]) == pytest.approx(expected)
    # A number asks for the formula, which knows the largest values alone.
    again = scales(group, -high, high, [reader(weight(columns))], 0.7, means=means).values
    assert again[0] == again[1]
