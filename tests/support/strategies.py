"""Hypothesis strategies for observers: values, quantization arguments, batches.

Values are small decimals first, so that a shrunk failing example reads like one written by hand;
the wide ranges that break things come in by scaling.
"""

import torch
from compressed_tensors.quantization import QuantizationArgs
from formats import CASES, FP8, INT4, INT8
from hypothesis import strategies as st

DECIMALS = st.integers(-40, 40).map(lambda tenths: tenths / 10)
MAGNITUDES = st.sampled_from([1.0, 1.0, 1.0, 1e-6, 1e-3, 1e3, 1e6, 1e18])


@st.composite
def tensors(
    draw: st.DrawFn,
    shape: tuple[int, ...] | None = None,
    dtype: torch.dtype = torch.float32,
    scaled: bool = True,
) -> torch.Tensor:
    """A tensor of the given shape, or of one to three small dimensions."""
    if shape is None:
        shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    count = 1
    for size in shape:
        count *= size
    values = draw(st.lists(DECIMALS, min_size=count, max_size=count))
    magnitude = draw(MAGNITUDES) if scaled else 1.0
    return (torch.tensor(values).reshape(shape) * magnitude).to(dtype)


@st.composite
def weights(draw: st.DrawFn, columns: int | None = None) -> torch.Tensor:
    rows = draw(st.integers(1, 5))
    return draw(tensors((rows, columns or draw(st.integers(1, 12)))))


@st.composite
def activations(draw: st.DrawFn, features: int | None = None) -> torch.Tensor:
    features = features or draw(st.integers(1, 8))
    return draw(tensors((draw(st.integers(1, 3)), draw(st.integers(1, 4)), features)))


def batches(features: int = 4, max_size: int = 5) -> st.SearchStrategy[list[torch.Tensor]]:
    return st.lists(activations(features), min_size=1, max_size=max_size)


@st.composite
def observables(draw: st.DrawFn) -> tuple[str, QuantizationArgs, torch.Tensor]:
    """A base name, quantization arguments that apply to it, and a value they can be used on."""
    base_name, fields = CASES[draw(st.sampled_from(sorted(CASES)))]
    args = QuantizationArgs(**fields)
    columns = (args.group_size or 1) * draw(st.integers(1, 3))
    if base_name == "weight":
        return base_name, args, draw(weights(columns))
    if base_name == "input":
        return base_name, args, draw(activations(columns))
    heads, tokens, size = draw(st.tuples(*[st.integers(1, 3)] * 3))
    return base_name, args, draw(tensors((draw(st.integers(1, 2)), heads, tokens, size)))


def integer_or_fp8_args(**fields: object) -> st.SearchStrategy[QuantizationArgs]:
    return st.builds(
        lambda bits, symmetric: QuantizationArgs(**{**bits, **fields, "symmetric": symmetric}),
        st.sampled_from([INT4, INT8, FP8]),
        st.booleans(),
    )
