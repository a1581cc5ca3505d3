"""What laws for observers are tried on: formats, and strategies for arguments, values, batches.

Values are small decimals first, so that a shrunk failing example reads like one written by hand;
the wide ranges that break things come in by scaling.
"""

import math
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs
from hypothesis import strategies as st

__all__ = [
    "CASES",
    "FP8",
    "INT4",
    "INT8",
    "MXFP4",
    "MXFP8",
    "NVFP4",
    "SHAPES",
    "Fields",
    "activations",
    "batches",
    "integer_or_fp8_args",
    "make_args",
    "observables",
    "padded_batches",
    "quantization_args",
    "tensors",
    "values",
    "weights",
]

Fields = dict[str, Any]  # of QuantizationArgs

INT4: Fields = {"num_bits": 4, "type": "int"}
INT8: Fields = {"num_bits": 8, "type": "int"}
FP8: Fields = {"num_bits": 8, "type": "float"}
NVFP4: Fields = {
    "num_bits": 4,
    "type": "float",
    "strategy": "tensor_group",
    "group_size": 16,
    "scale_dtype": torch.float8_e4m3fn,
    "zp_dtype": torch.float8_e4m3fn,
}
MXFP4: Fields = {
    "num_bits": 4,
    "type": "float",
    "strategy": "group",
    "group_size": 32,
    "scale_dtype": torch.uint8,
    "zp_dtype": torch.uint8,
}
MXFP8: Fields = {**MXFP4, "num_bits": 8}

_WEIGHT_STRATEGIES: dict[str, Fields] = {
    "tensor": {"strategy": "tensor"},
    "channel": {"strategy": "channel"},
    "group": {"strategy": "group", "group_size": 16},
    "block": {"strategy": "block", "block_structure": [8, 24]},
}
_ACTIVATION_STRATEGIES: dict[str, Fields] = {
    "tensor": {"strategy": "tensor"},
    "token": {"strategy": "token", "dynamic": True},
    "group": {"strategy": "group", "group_size": 16},
}
_ATTENTION_STRATEGIES: dict[str, Fields] = {
    "tensor": {"strategy": "tensor"},
    "attn_head": {"strategy": "attn_head"},
}

SHAPES = {"weight": (20, 64), "input": (2, 5, 64), "k": (2, 4, 5, 16)}


def _combine(strategies: dict[str, Fields]) -> dict[str, Fields]:
    return {
        f"{format}-{strategy}-{'symmetric' if symmetric else 'asymmetric'}": {
            **bits,
            **shape,
            "symmetric": symmetric,
        }
        for format, bits in {"int4": INT4, "int8": INT8, "fp8": FP8}.items()
        for strategy, shape in strategies.items()
        for symmetric in (True, False)
    }


CASES: dict[str, tuple[str, Fields]] = {
    f"{base_name}-{name}": (base_name, fields)
    for base_name, cases in {
        "weight": {
            **_combine(_WEIGHT_STRATEGIES),
            "nvfp4": NVFP4,
            "mxfp4": MXFP4,
            "mxfp8": MXFP8,
        },
        "input": {
            **_combine(_ACTIVATION_STRATEGIES),
            "nvfp4-local": {**NVFP4, "dynamic": "local"},
            "mxfp4": MXFP4,
        },
        "k": _combine(_ATTENTION_STRATEGIES),
    }.items()
    for name, fields in cases.items()
}


def make_args(fields: Fields, **more: Any) -> QuantizationArgs:
    """QuantizationArgs of these fields, and of others in their place."""
    return QuantizationArgs(**{**fields, **more})


_MAGNITUDES = st.sampled_from([1.0, 1.0, 1.0, 1e-6, 1e-3, 1e3, 1e6, 1e18])
_LARGEST = 40  # tenths


@st.composite
def tensors(
    draw: st.DrawFn,
    shape: tuple[int, ...] | None = None,
    dtype: torch.dtype = torch.float32,
    scaled: bool = True,
) -> torch.Tensor:
    """A tensor of the given shape, or of one to three small dimensions.

    Its values are decimals from -4 to 4: any, all the same, or all of one sign.

    :param scaled: whether to multiply them with a small or large number, too
    """
    if shape is None:
        shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    count = math.prod(shape)
    kind = draw(st.sampled_from(["any", "constant", "positive", "negative"]))
    # A byte for a number is drawn, and shrunk, a hundred times as fast as numbers one by one.
    drawn = 1 if kind == "constant" else count
    numbers = draw(st.binary(min_size=drawn, max_size=drawn))
    tenths = torch.tensor([_as_tenths(number) for number in numbers], dtype=torch.float32)
    if kind in ("positive", "negative"):
        tenths = tenths.abs() if kind == "positive" else -tenths.abs()
    magnitude = draw(_MAGNITUDES) if scaled else 1.0
    return (tenths.expand(count).reshape(shape) / 10 * magnitude).to(dtype).clone()


def _as_tenths(byte: int) -> int:
    """Whole numbers around zero, the simplest for the smallest byte: 0, 1, -1, 2, -2, …"""
    place = byte % (2 * _LARGEST + 1)
    return (place + 1) // 2 if place % 2 else -(place // 2)


@st.composite
def weights(draw: st.DrawFn, columns: int | None = None) -> torch.Tensor:
    """A weight of one to five rows."""
    rows = draw(st.integers(1, 5))
    return draw(tensors((rows, columns or draw(st.integers(1, 12)))))


@st.composite
def activations(draw: st.DrawFn, features: int | None = None) -> torch.Tensor:
    """An activation of a few sequences with a few tokens each."""
    features = features or draw(st.integers(1, 8))
    return draw(tensors((draw(st.integers(1, 3)), draw(st.integers(1, 4)), features)))


def batches(features: int = 4, max_size: int = 5) -> st.SearchStrategy[list[torch.Tensor]]:
    """Batches of activations, of several shapes."""
    return st.lists(activations(features), min_size=1, max_size=max_size)


@st.composite
def padded_batches(
    draw: st.DrawFn,
    features: int = 4,
    base_name: str = "input",
    dtype: torch.dtype = torch.float32,
    scaled: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch and its attention mask, with at least one valid token.

    :param base_name: `q`, `k` or `v` for states of attention, (sequences, 2 heads, tokens, size)
    """
    rows, tokens = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    kept = draw(st.lists(st.booleans(), min_size=rows * tokens, max_size=rows * tokens))
    kept[draw(st.integers(0, len(kept) - 1))] = True
    mask = torch.tensor(kept).reshape(rows, tokens).long()
    attention = base_name in ("q", "k", "v")
    shape = (rows, 2, tokens, features) if attention else (rows, tokens, features)
    return draw(tensors(shape, dtype, scaled)), mask


def quantization_args(base_name: str = "input") -> st.SearchStrategy[QuantizationArgs]:
    """Arguments that apply to a base name: each format with each strategy."""
    kind = "k" if base_name in ("q", "v") else base_name.replace("output", "input")
    fields = [fields for of, fields in CASES.values() if of == kind]
    return st.sampled_from(fields).map(lambda fields: QuantizationArgs(**fields))


@st.composite
def values(
    draw: st.DrawFn,
    args: QuantizationArgs,
    base_name: str = "input",
    dtype: torch.dtype = torch.float32,
    scaled: bool = True,
    columns: int | None = None,
    heads: int = 2,
) -> torch.Tensor:
    """A value that these arguments can be used on: a weight, an activation, a state of attention.

    :param columns: its features, if several values have to agree; a number the arguments allow
    """
    columns = columns or (args.group_size or 1) * draw(st.integers(1, 3))
    if base_name == "weight":
        return draw(tensors((draw(st.integers(1, 5)), columns), dtype, scaled))
    rows, tokens = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    attention = base_name in ("q", "k", "v")
    shape = (rows, heads, tokens, columns) if attention else (rows, tokens, columns)
    return draw(tensors(shape, dtype, scaled))


@st.composite
def observables(draw: st.DrawFn) -> tuple[str, QuantizationArgs, torch.Tensor]:
    """A base name, quantization arguments that apply to it, and a value they can be used on."""
    base_name = draw(st.sampled_from(["weight", "input", "k"]))
    args = draw(quantization_args(base_name))
    return base_name, args, draw(values(args, base_name, heads=draw(st.integers(1, 3))))


def integer_or_fp8_args(**fields: Any) -> st.SearchStrategy[QuantizationArgs]:
    """Arguments of int4, int8 and fp8, symmetric or not, with these fields besides."""
    return st.builds(
        lambda bits, symmetric: QuantizationArgs(**{**bits, **fields, "symmetric": symmetric}),
        st.sampled_from([INT4, INT8, FP8]),
        st.booleans(),
    )
