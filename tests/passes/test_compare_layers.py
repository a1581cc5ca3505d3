"""Layers compared with their quantized selves, inside the plain model."""

import pytest
import torch
import torch.nn.functional as F
from graphs import STATIC, TRACERS, Functional, linear, ops, trace

from inlay.calibration.pipelines import comparing
from inlay.equalization.parameters import EqualizedParameters
from inlay.graph import added_inputs
from inlay.nodes.compare_layer import CompareLayer
from inlay.nodes.quantize import QuantizeDequantize, fold_weight
from inlay.passes import Annotate, CompareLayers
from inlay.recipe import Plan, Recipe

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


def qparams_of(plan: Plan, model, x: torch.Tensor) -> dict:
    values = {"fc.weight": model.fc.weight.detach(), "fc.input": x}
    slots = [slot for slot in plan.slots.values() if slot.is_observed]
    return {slot.name: slot.make_observer()(values[slot.name]).get_qparams() for slot in slots}


def one_layer(bias: bool = False):
    model = Functional(lambda self, x: self.fc(x), fc=linear())
    if bias:
        model.fc.bias = torch.nn.Parameter(torch.arange(4.0))
    return model


def test_docstring_example() -> None:
    model = one_layer()
    plan = Plan(model, STATIC)
    gm = Annotate(plan=plan)(trace("dynamo", model, X)).graph_module
    result = CompareLayers(plan=plan, qparams=qparams_of(plan, model, X))(gm)
    assert result.modified
    assert ops(result.graph_module) == [
        "linear = linear(x, fc.weight, None)",
        "compare_layer = compare_layer(x, linear, fc.weight, fc.weight folded, …)"
        "  # by CompareLayers",
        "return (linear)",
    ]
    added = set(map(str, added_inputs(result.graph_module.graph).values()))
    assert {"fc.weight folded", "fc errors", "fc.input scale"} <= added


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("how", TRACERS)
def test_sums_are_the_powers_of_signal_and_error(how: str, bias: bool) -> None:
    model = one_layer(bias)
    plan = Plan(model, STATIC)
    qparams = qparams_of(plan, model, X)
    gm = trace(how, model, X)
    compared = comparing(plan, qparams, EqualizedParameters(model))(gm).graph_module
    weight, slots = model.fc.weight.detach(), plan.slots
    folded = fold_weight(weight, slots["fc.weight"].args, qparams["fc.weight"])
    known = {"fc.weight folded": folded, "fc errors": torch.zeros(1, 5, dtype=torch.float64)}
    known |= {f"fc.input {name}": value for name, value in qparams["fc.input"].items()}
    parameters = {"weight": weight, "bias": model.fc.bias, "x": X}
    added = added_inputs(compared.graph)
    inputs = [
        known[str(added[node])]
        if node in added
        else next(value for name, value in parameters.items() if name in node.name.split("_"))
        for node in compared.graph.find_nodes(op="placeholder")
    ]
    with torch.no_grad():
        output = torch.fx.Interpreter(compared).run(*inputs, enable_io_processing=False)
        expected = model(X)
        q = qparams["fc.input"]
        quantize = QuantizeDequantize(slots["fc.input"].args, ("scale", "zero_point"))
        quantized = quantize(X, q["scale"], q["zero_point"])
        error = F.linear(quantized, folded) - F.linear(X, weight)
    assert torch.equal(output if isinstance(output, torch.Tensor) else output[0], expected)
    powers = [t.double().square().sum() for t in (expected, error, X, quantized - X)]
    torch.testing.assert_close(
        known["fc errors"][0], torch.stack([*powers, torch.tensor(3.0).double()])
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("quantized", ["weight", "input", "both"])
def test_one_product_tells_what_two_tell(quantized: str, dtype: torch.dtype) -> None:
    """A layer of which one operand is quantized has the error of the two products' difference."""
    torch.manual_seed(0)
    plan = Plan(one_layer(), STATIC)
    slots = plan.slots
    x, weight = torch.randn(2, 3, 8, dtype=dtype), torch.randn(4, 8, dtype=dtype)
    args = slots["fc.input"].args
    qparams = (torch.tensor([0.1]), torch.tensor([3], dtype=torch.int8))
    quantize = QuantizeDequantize(args, ("scale", "zero_point"))
    folded = weight if quantized == "input" else (weight * 8).round() / 8
    used = x if quantized == "weight" else quantize(x, *qparams)
    sums = torch.zeros(1, 5, dtype=torch.float64)
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]]) == 1
    node = CompareLayer(plan.weights_of("fc"), None if quantized == "weight" else quantize)
    node(x, F.linear(x, weight), weight, folded, sums, *qparams, mask=mask)
    kept = mask.flatten()
    rows = (t.flatten(0, 1)[kept].double() for t in (used, x))
    products = [F.linear(a, w.double()) for a, w in zip(rows, (folded, weight), strict=True)]
    torch.testing.assert_close(sums[0, 1], (products[0] - products[1]).square().sum())
    assert sums[0, 4] == 5


def test_what_is_not_quantized_is_not_compared() -> None:
    model = one_layer()
    plan = Plan(model, STATIC)
    gm = Annotate(plan=plan)(trace("dynamo", model, X)).graph_module
    assert not CompareLayers(plan=plan, qparams={})(gm).modified


@pytest.mark.parametrize("how", TRACERS)
def test_second_run_changes_nothing_and_the_input_is_left_alone(how: str) -> None:
    model = one_layer()
    plan = Plan(model, Recipe.from_preset("W8A8"))
    gm = Annotate(plan=plan)(trace(how, model, X)).graph_module
    before = ops(gm)
    compare = CompareLayers(plan=plan, qparams=qparams_of(plan, model, X))
    once = compare(gm)
    assert once.modified
    assert ops(gm) == before
    again = compare(once.graph_module)
    assert not again.modified
    assert ops(again.graph_module) == ops(once.graph_module)
