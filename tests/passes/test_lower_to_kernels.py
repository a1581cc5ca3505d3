"""Integer kernels compute what quantize-dequantize computes in float64, rounded once."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle import dequantize, quantize
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp
from graphs import (
    STATIC,
    TRACERS,
    Functional,
    inputs_for,
    linear,
    observed,
    ops,
    qparams_of,
    targets,
    trace,
    with_constants,
)
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule
from torch.utils._python_dispatch import TorchDispatchMode

from inlay import Recipe
from inlay.graph import added_inputs, bind, fake_value
from inlay.nodes import kernel_support
from inlay.nodes.kernel_support import missing_kernels, unsupported_formats, unsupported_sizes
from inlay.nodes.kernels import (
    DynamicQParams,
    Quantize,
    column_sums,
    float8_linear,
    integer_linear,
    integer_weight,
    is_float8,
)
from inlay.nodes.quantize import fold_weight
from inlay.passes import (
    Annotate,
    FoldQParams,
    LowerToKernels,
    Pipeline,
    RemoveObservers,
    kept_from_kernels,
)
from inlay.recipe import Plan

X = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
DYNAMIC = Recipe.from_preset("W8A8")
FLOAT = Recipe.from_preset("FP8")
FLOATS = Recipe.from_preset("FP8_DYNAMIC")


@pytest.fixture(autouse=True)
def with_vnni(monkeypatch) -> None:
    """Every processor computes integer products; only some compute them fast, and large ones."""
    monkeypatch.setattr(kernel_support, "SMALLEST", {})
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_vnni": True})
    missing_kernels.cache_clear()
    yield
    missing_kernels.cache_clear()


@st.composite
def layers(draw: Any) -> dict[str, Any]:
    """A quantized input, a quantized weight, and a bias."""
    torch.manual_seed(draw(st.integers(0, 2**16)))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    outputs, inputs = draw(st.integers(1, 40)), draw(st.integers(2, 70))
    lead = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    per_token, symmetric = draw(st.booleans()), draw(st.booleans())
    offset = draw(st.sampled_from([0.0, 3.0, -0.5]))
    args = QuantizationArgs(
        num_bits=8,
        strategy="token" if per_token else "tensor",
        dynamic=per_token,
        symmetric=symmetric,
    )
    value = (torch.randn(*lead, inputs) + offset).to(dtype)
    if draw(st.booleans()):
        value = value.transpose(0, -1).contiguous().transpose(0, -1)
    weights = QuantizationArgs(
        num_bits=draw(st.sampled_from([4, 8])),
        strategy=draw(st.sampled_from(["channel", "tensor"])),
    )
    weight = torch.randn(outputs, inputs).to(dtype)
    highest = weight.abs().amax(1, keepdim=True) if weights.strategy == "channel" else weight.max()
    weight_scale = (highest.abs().clamp(min=1e-3) / 2 ** (weights.num_bits - 1)).reshape(-1, 1)
    bias = torch.randn(outputs).to(dtype) if draw(st.booleans()) else None
    return {
        "args": args, "value": value, "weights": weights, "weight": weight,
        "weight_scale": weight_scale if weights.strategy == "channel" else weight_scale[0],
        "bias": bias,
    }  # fmt: skip


@pytest.mark.hypothesis
@examples(60)
@given(layers())
def test_a_kernel_rounds_once(layer: dict[str, Any]) -> None:
    args, value, bias = layer["args"], layer["value"], layer["bias"]
    if args.dynamic:
        scale, zero_point = found = DynamicQParams(args)(value)
        for fake, real in zip(DynamicQParams(args).examples(value), found, strict=True):
            assert (fake.shape, fake.dtype) == (real.shape, real.dtype)
    else:
        scale = (value.max() - value.min()).reshape(1).clamp(min=1e-3) / 200
        zero_point = torch.tensor([0 if args.symmetric else -17], dtype=torch.int8)
    given_zero = () if args.symmetric else (zero_point,)
    integers = Quantize(args)(value, scale, *given_zero)
    weight = integer_weight(layer["weight"], layer["weight_scale"], layer["weights"])
    sums = () if args.symmetric else (zero_point, column_sums(weight))
    found = integer_linear(
        integers, weight, scale, layer["weight_scale"], *sums, bias=bias, dtype=value.dtype
    )

    wide = integers.double() - (0 if args.symmetric else zero_point.double())
    x = wide * scale.double()
    w = weight.double() * layer["weight_scale"].double()
    expected = F.linear(x, w, None if bias is None else bias.double())
    added = F.linear(x.abs(), w.abs()) + (0 if bias is None else bias.abs())
    in_between = 2**-50 if value.dtype == torch.float32 else 2**-22
    smallest = torch.finfo(value.dtype).smallest_normal * torch.finfo(value.dtype).eps
    allowed = torch.finfo(value.dtype).eps / 2 * expected.abs() + in_between * added + smallest
    assert found.dtype == value.dtype
    assert found.shape == expected.shape
    assert ((found.double() - expected).abs() <= allowed).all()


@pytest.mark.hypothesis
@examples(60)
@given(layers(), st.integers(2, 8), st.booleans(), st.booleans())
def test_values_are_quantized_as_by_compressed_tensors(
    layer: dict[str, Any], bits: int, zero: bool, is_float: bool
) -> None:
    """Bit for bit, although the ops are written anew."""
    args, value = layer["args"].model_copy(update={"num_bits": bits}), layer["value"]
    if is_float and args.symmetric:
        args = args.model_copy(update={"num_bits": 8, "type": "float"})
    if zero:
        value[0] = 0
    if args.dynamic:
        scale, zero_point = qparams = compute_dynamic_scales_and_zp(value, args, None)
        for found, expected in zip(DynamicQParams(args)(value), qparams, strict=True):
            assert found.dtype == expected.dtype
            assert torch.equal(found, expected)
    else:
        scale, zero_point = torch.tensor([0.0123]), torch.tensor([1], dtype=torch.int8)
    zero_point = None if is_float8(args) else zero_point
    expected = quantize(value, scale, zero_point, args, dtype=args.pytorch_dtype())
    assert torch.equal(Quantize(args)(value, scale, zero_point).float(), expected.float())


@pytest.mark.hypothesis
@examples(30)
@given(layers())
def test_integers_are_those_that_quantize_dequantize_rounds_to(layer: dict[str, Any]) -> None:
    weights, scale = layer["weights"], layer["weight_scale"]
    integers = integer_weight(layer["weight"], scale, weights)
    folded = fold_weight(layer["weight"], weights, {"scale": scale})
    assert torch.equal(dequantize(integers, scale, None, weights), folded)


@pytest.mark.hypothesis
@examples(15)
@given(layers())
def test_a_float8_product_is_that_of_the_values(layer: dict[str, Any]) -> None:
    """Up to its sum in float32; the op runs on a CPU too, though slowly."""
    given_args, weights = (
        layer[name].model_copy(update={"num_bits": 8, "type": "float", "symmetric": True})
        for name in ("args", "weights")
    )
    value, bias, weight_scale = layer["value"], layer["bias"], layer["weight_scale"] / 4
    scale = DynamicQParams(given_args)(value)[0] if given_args.dynamic else torch.tensor([0.02])
    values = Quantize(given_args)(value, scale)
    weight = integer_weight(layer["weight"], weight_scale, weights)
    assert values.dtype == weight.dtype == torch.float8_e4m3fn
    found = float8_linear(values, weight, scale, weight_scale, bias=bias, dtype=value.dtype)
    x, w = values.double() * scale.double(), weight.double() * weight_scale.double()
    exact = F.linear(x, w, None if bias is None else bias.double())
    added = F.linear(x.abs(), w.abs()) + (0 if bias is None else bias.abs())
    allowed = torch.finfo(value.dtype).eps * exact.abs() + 2**-20 * added
    assert (found.dtype, found.shape) == (value.dtype, exact.shape)
    assert ((found.double() - exact).abs() <= allowed + 1e-7).all()


def finalized(
    model: nn.Module, recipe: Recipe, values: Any = None, *, how: str = "dynamo"
) -> tuple[GraphModule, GraphModule]:
    """The graph that quantizes, with constants, before and after it is lowered."""
    plan = Plan(model, recipe)
    qparams = qparams_of(plan, model, values)
    folding = Pipeline((FoldQParams(qparams=qparams), RemoveObservers()))
    folded = folding(observed(trace(how, model, X), plan)).graph_module
    lowered = LowerToKernels(qparams=qparams)(folded).graph_module
    # A graph that is lowered is left alone, and knows so.
    again = LowerToKernels(qparams=qparams)(lowered)
    assert not again.modified
    return tuple(with_constants(gm, plan, model, qparams) for gm in (folded, lowered))  # type: ignore[return-value]


def run(gm: GraphModule) -> torch.Tensor:
    with torch.no_grad():
        found = gm(*inputs_for(gm, X))
    return found if isinstance(found, torch.Tensor) else torch.cat([t.flatten() for t in found])


def test_docstring_example() -> None:
    model = Functional(lambda self, x: self.fc(x), fc=linear())
    plan = Plan(model, STATIC)
    qparams = qparams_of(plan, model, {"fc.input": X})
    folding = Pipeline((FoldQParams(qparams=qparams), RemoveObservers()))
    folded = folding(observed(trace("dynamo", model, X), plan)).graph_module
    result = LowerToKernels(qparams=qparams)(folded)
    assert ops(result.graph_module) == [
        "quantize = quantize(x, …)  # by LowerToKernels",
        "integer_linear = integer_linear(quantize, fc.weight integers, dtype=torch.float32, …)"
        "  # by LowerToKernels",
        "return (integer_linear)",
    ]
    added = set(map(str, added_inputs(result.graph_module.graph).values()))
    assert added == {
        "fc.input scale", "fc.input zero_point", "fc.weight integers", "fc.weight scale",
        "fc.weight sums",
    }  # fmt: skip


class Products(nn.Module):
    """A layer in each of four spellings, three of them with a bias."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c, self.d = (nn.Linear(4, 6) for _ in range(4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows = x.reshape(-1, x.shape[-1])
        return (
            self.a(x),
            x @ self.b.weight.t(),
            torch.addmm(self.c.bias, rows, self.c.weight.t()),
            torch.matmul(x, self.d.weight.T) + self.d.bias,
        )


@pytest.mark.parametrize("how", TRACERS)
@pytest.mark.parametrize("recipe", [STATIC, DYNAMIC], ids=["static", "dynamic"])
def test_every_spelling_of_a_product_is_lowered(how: str, recipe: Recipe) -> None:
    model = Products()
    values = {f"{name}.input": X for name in "abcd"}
    folded, lowered = finalized(model, recipe, values, how=how)
    assert "quantize_dequantize" not in targets(lowered)
    assert targets(lowered).count("integer_linear") == 4
    torch.testing.assert_close(run(lowered), run(folded))


@pytest.mark.parametrize("recipe", [STATIC, DYNAMIC], ids=["static", "dynamic"])
def test_layers_that_read_one_value_share_its_integers(recipe: Recipe) -> None:
    model = Functional(lambda self, x: (self.q(x), self.k(x)), q=linear(), k=linear(seed=1))
    folded, lowered = finalized(model, recipe, {"q.input": X, "k.input": X})
    assert targets(lowered).count("quantize") == 1
    assert targets(lowered).count("integer_linear") == 2
    torch.testing.assert_close(run(lowered), run(folded))


@pytest.mark.parametrize(
    ("recipe", "reason"),
    [
        (
            Recipe.from_preset("W8A16", weights={"strategy": "channel"}),
            "its input is not quantized",
        ),
        (Recipe.from_preset("W4A8", weights={"group_size": 4}), "scales per group"),
        (Recipe.from_preset("FP8"), "float8 products run with CUDA, not on a CPU"),
        (Recipe.from_preset("W8A8_STATIC", weights={"symmetric": False}), "zero points"),
        (
            Recipe.from_preset("W8A8", inputs={"strategy": "group", "group_size": 4}),
            "its input has scales per group",
        ),
    ],
    ids=["weight only", "groups", "float", "zero points", "groups of inputs"],
)
def test_what_no_kernel_computes_stays_and_says_why(recipe: Recipe, reason: str) -> None:
    model = Functional(lambda self, x: self.fc(x), fc=linear())
    _, lowered = finalized(model, recipe, {"fc.input": X})
    assert "linear" in targets(lowered)
    ((_, said),) = kept_from_kernels(lowered)
    assert reason in said


def test_how_many_inputs_a_kernel_takes() -> None:
    eight = QuantizationArgs(num_bits=8, strategy="tensor")
    assert unsupported_formats(eight, eight, 65535) is None
    assert "one column" in str(unsupported_formats(eight, eight, 1))
    assert "65536 inputs" in str(unsupported_formats(eight, eight, 65536))
    lowest = torch.full((1, 65535), -128, dtype=torch.int8)
    scale = torch.ones(1)
    found = integer_linear(
        lowest, lowest, scale, scale, torch.tensor([127]), column_sums(lowest), dtype=torch.float64
    )
    assert found.item() == 65535 * 255 * 128


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda patch: patch.setattr(torch.cpu, "get_capabilities", dict), "no AVX-512 VNNI"),
        (
            lambda patch: patch.setattr(kernel_support, "has_integer_product", lambda: False),
            "version of torch",
        ),
        (
            lambda patch: patch.setattr(torch.backends.mkldnn, "is_available", lambda: False),
            "no oneDNN",
        ),
    ],
)
def test_without_a_kernel_it_falls_back_and_says_so(monkeypatch, change, reason: str) -> None:
    change(monkeypatch)
    missing_kernels.cache_clear()
    model = Functional(lambda self, x: self.fc(x), fc=linear())
    _, lowered = finalized(model, STATIC, {"fc.input": X})
    assert targets(lowered) == ["quantize_dequantize", "linear"]
    ((_, said),) = kept_from_kernels(lowered)
    assert reason in said


class Recorded(TorchDispatchMode):
    """Notes the names of ops."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def on_cuda(monkeypatch: Any, recipe: Recipe, capability: tuple[int, int] = (8, 9)) -> Any:
    """Lower a layer for a GPU that is not there, with tensors that have no data."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    model = Functional(lambda self, x: self.fc(x), fc=linear(16, 32))
    qparams = qparams_of(Plan(model, recipe), model, {"fc.input": torch.randn(2, 3, 32)})
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(2, 3, 32, device="cuda")
        model.fc.weight = nn.Parameter(torch.empty(16, 32, device="cuda"), requires_grad=False)
        plan = Plan(model, recipe)
        traced = torch.export.export(model, (x,)).module(check_guards=False)
        folding = Pipeline((Annotate(plan=plan), FoldQParams(qparams=qparams)))
        folded = folding(traced).graph_module
        lowered = LowerToKernels(qparams=qparams)(folded).graph_module
        added = {
            what: torch.empty_like(fake_value(node), device="cuda")
            for node, what in added_inputs(lowered.graph).items()
        }
        with Recorded() as ops_run:
            result = bind(lowered, added)(x)
    return lowered, result, ops_run.names


@pytest.mark.parametrize(
    ("recipe", "op"),
    [(STATIC, "_int_mm"), (DYNAMIC, "_int_mm"), (FLOAT, "_scaled_mm"), (FLOATS, "_scaled_mm")],
    ids=["static", "dynamic", "float8", "float8 per token"],
)
def test_the_graph_for_a_gpu(monkeypatch: Any, recipe: Recipe, op: str) -> None:
    """No GPU ran it: ops know the shapes and dtypes of their results without one."""
    lowered, result, ran = on_cuda(monkeypatch, recipe)
    assert "quantize_dequantize" not in targets(lowered)
    assert (result.device.type, result.shape, result.dtype) == ("cuda", (2, 3, 16), torch.float32)
    assert ran.count(op) == 1
    assert not {"mm", "addmm"} & set(ran)


def test_what_a_gpu_does_not_multiply_stays(monkeypatch: Any) -> None:
    lowered, _, ran = on_cuda(monkeypatch, FLOAT, (8, 0))
    ((_, reason),) = kept_from_kernels(lowered)
    assert reason == "float8 products need compute capability 8.9; the GPU has 8.0"
    assert "_scaled_mm" not in ran
    assert "divisible by 16 only, not 24 and 32" in str(
        unsupported_sizes("cuda", "float", torch.Size((24, 32)))
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_small_weights_stay_by_the_table_and_say_so(monkeypatch: Any, dtype: torch.dtype) -> None:
    model = Functional(lambda self, x: self.fc(x), fc=linear())
    monkeypatch.setattr(kernel_support, "SMALLEST", {torch.float32: 17, torch.bfloat16: 16})
    model, x = model.to(dtype), X.to(dtype)
    plan = Plan(model, STATIC)
    qparams = qparams_of(plan, model, {"fc.input": x})
    folding = Pipeline((FoldQParams(qparams=qparams), RemoveObservers()))
    folded = folding(observed(trace("dynamo", model, x), plan)).graph_module
    lowered = LowerToKernels(qparams=qparams)(folded)
    reasons = [reason for _, reason in kept_from_kernels(lowered.graph_module)]
    small = ["it has 16 weights, and kernels pay from 17 on in torch.float32"]
    assert reasons == (small if dtype == torch.float32 else [])
    assert lowered.modified == (dtype == torch.bfloat16)
