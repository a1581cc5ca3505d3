import pytest
import torch
from graphs import Functional, inputs_for, ops, trace
from torch import nn

from inlay import Calibration, Recipe, products
from inlay.calibration import decision
from inlay.nodes.fast_linear import fast_linear
from inlay.passes import SpeedUpProducts

X = torch.randn(3, 5, 4)
ALL = SpeedUpProducts(smallest=1)


def layer(bias: bool = False) -> nn.Module:
    return Functional(lambda self, x: self.fc(x), fc=nn.Linear(4, 6, bias=bias))


def test_docstring_example() -> None:
    model = layer()  # graphs know its weight by a weak reference
    result = ALL(trace("dynamo", model, X))
    assert result.modified
    assert ops(result.graph_module)[-2:] == [
        "linear = fast_linear(x, fc.weight, None)  # by SpeedUpProducts",
        "return (linear)",
    ]


@pytest.mark.parametrize("how", ["dynamo", "export"])
@pytest.mark.parametrize("bias", [False, True])
def test_it_computes_the_same(how: str, bias: bool) -> None:
    model = layer(bias)
    gm = ALL(trace(how, model, X)).graph_module
    with torch.no_grad():
        result = gm(*inputs_for(gm, X))
    result = result if isinstance(result, torch.Tensor) else result[0]
    torch.testing.assert_close(result, model(X))
    assert not ALL(gm).modified


def test_small_and_half_precision_weights_stay() -> None:
    model = layer()
    assert not SpeedUpProducts()(trace("dynamo", model, X)).modified
    half = layer().bfloat16()
    assert not ALL(trace("dynamo", half, X.bfloat16())).modified


@pytest.mark.parametrize(
    ("shape", "transposed"),
    [((3, 5, 4), True), ((4,), False), ((1, 4), False), ((0, 4), False), ((2, 0, 4), False)],
)
def test_values_and_weights_of_every_shape(shape: tuple[int, ...], transposed: bool) -> None:
    value, weight = torch.randn(shape), torch.randn(6, 4)
    if transposed:
        weight = weight.t().contiguous().t()
    with torch.no_grad():
        torch.testing.assert_close(
            fast_linear(value, weight), torch.nn.functional.linear(value, weight)
        )


def test_gradients_and_autocast_are_those_of_linear() -> None:
    value, weight = torch.randn(3, 4, requires_grad=True), torch.randn(6, 4)
    fast_linear(value, weight).sum().backward()
    torch.testing.assert_close(value.grad, weight.sum(0).expand(3, 4))
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert fast_linear(value, weight).dtype == torch.bfloat16


@pytest.mark.parametrize("compiler", ["auto", "eager"])
def test_only_auto_leaves_products_to_it(monkeypatch, compiler: str) -> None:
    """And says so. Its statistics are those of other products, up to rounding."""
    monkeypatch.setattr(decision, "onednn_is_faster", lambda: True)
    layers = nn.Sequential(*(nn.Linear(128, 128) for _ in range(2)))
    recipe = Recipe.from_preset("W8A8_STATIC")
    calibration = Calibration(layers, recipe, compiler=compiler)
    eager = Calibration(layers, recipe, compiler="eager")
    value = torch.randn(7, 128)
    for one in (calibration, eager):
        one.observe(value)
    assert ("oneDNN" in calibration.explain()) == (compiler == "auto")
    for slot, found in eager.finalize().items():
        torch.testing.assert_close(calibration.finalize()[slot], found)


@pytest.mark.parametrize(
    ("vendor", "capability", "faster"),
    [
        ("AuthenticAMD", "AVX512", True),
        ("AuthenticAMD", "AVX2", False),  # MKL takes its AVX2 code there
        ("GenuineIntel", "AVX512", False),
        ("", "DEFAULT", False),
    ],
)
def test_the_faster_library_is_looked_up(monkeypatch, vendor, capability, faster) -> None:
    """By processor: a timing would let the load of the machine choose the bits of a run."""
    monkeypatch.setattr(products, "_processor", lambda: f"vendor_id : {vendor}")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    for library in (torch.backends.mkl, torch.backends.mkldnn):
        monkeypatch.setattr(library, "is_available", lambda: True)
    assert products.onednn_is_faster.__wrapped__() == faster
