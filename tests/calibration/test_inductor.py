"""A few well-chosen cases on Inductor itself."""

from dataclasses import asdict

import pytest
import torch
import torch.nn.functional as F
from families import batch, llama
from plain_llama import plain_llama
from torch import nn

from inlay import Calibration, Recipe
from inlay.calibration.decision import Decision
from inlay.calibration.tracing.strategies import call
from inlay.data.batch import on_device_of, varying_sizes
from inlay.nodes import kernel_support
from inlay.nodes.kernel_support import missing_kernels
from inlay.observers import Observer
from inlay.recipe import make_observer

pytestmark = pytest.mark.slow

STATIC = Recipe.from_preset("W8A8_STATIC", ignore=["lm_head"], inputs={"observer": "static_minmax"})


class Telling(nn.Module):
    """Returns what its Linear modules read, so that eager observers can see the same tensors."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.RMSNorm(64)
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        read_by_up = self.norm(x) * 1.1 + 0.01
        read_by_down = F.silu(self.up(read_by_up)) * 3
        return read_by_up, read_by_down, self.down(read_by_down)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("memoryless_minmax", torch.bfloat16),
        ("static_minmax", torch.float32),
        ("static_minmax", torch.bfloat16),
        ("minmax", torch.float32),
    ],
)
def test_statistics_are_those_of_eager_observers_on_the_same_tensors(
    name: str, dtype: torch.dtype
) -> None:
    """Bit for bit, although Inductor rounds bfloat16 only where it stores."""
    model = Telling().to(dtype)
    recipe = Recipe.from_preset("W8A8_STATIC", inputs={"observer": name, "observer_kwargs": {}})
    calibration = Calibration(model, recipe)
    compiled = torch.compile(model, backend=calibration.backend)
    (scheme,) = recipe.config.config_groups.values()
    eager = {n: make_observer("input", scheme.input_activations) for n in ("up", "down")}
    with torch.no_grad():
        for index in range(4):
            x = torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(index)) * (index + 1)
            read_by_up, read_by_down, _ = compiled(x.to(dtype))
            eager["up"](read_by_up)
            eager["down"](read_by_down)
    for module, expected in eager.items():
        found = calibration.statistics.snapshot()[f"{module}.input"].observer()
        assert torch.equal(found.min_vals, expected.min_vals), (module, "min")
        assert torch.equal(found.max_vals, expected.max_vals), (module, "max")


def test_outputs_are_those_of_the_plain_compiled_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_support, "SMALLEST", {})  # for which kernels pay
    model = plain_llama(num_hidden_layers=1)
    one = batch(model)
    with torch.no_grad():
        plain = torch.compile(model)(**one).logits
        torch._dynamo.reset()
        calibration = Calibration(model, STATIC)
        observed = torch.compile(model, backend=calibration.backend)
        assert torch.equal(observed(**one).logits, plain)
        calibration.finalize()
        quantized = observed(**one).logits
        # Elsewhere, the fallback: it is said in either case.
        assert ("integer kernels compute" in calibration.explain()) == (not missing_kernels("cpu"))
        torch._dynamo.reset()
        exact = Calibration(model, STATIC, compiler="aot_eager")
        exact.observe(**one)
        exact.finalize()
        expected = torch.compile(model, backend=exact.backend)(**one).logits
        assert "integer kernels" not in exact.explain()
    # A compiler's rounding moves a few values over to the next step of eight bits.
    assert float((quantized - expected).abs().max()) < 0.3 * float((expected - plain).abs().max())


@pytest.mark.parametrize("depth", [2, 8])
def test_compilations_do_not_grow_with_depth(depth: int) -> None:
    model = llama(num_hidden_layers=depth)
    calibration = Calibration(model, STATIC, compiler="eager")  # any compiler is called as often
    calibration.observe(**batch(model))
    assert calibration.graphs.compiler_calls == 1  # a block
    found = calibration.finalize()
    assert len(found) == depth * 14


def test_pieces_compiled_when_they_first_run() -> None:
    """Dynamo is long done by then; the code has to be right for lengths that come later."""
    model = plain_llama(num_hidden_layers=3)
    batches = [batch(model, index, tokens=length) for index, length in enumerate([6, 9, 5, 12])]
    found = []
    for compiler in ("eager", "auto"):
        torch._dynamo.reset()
        calibration = Calibration(model, STATIC, compiler=compiler)
        calibration.graphs.auto.restore(asdict(Decision(compiled="everything")))
        for one in batches:
            call(calibration.observe, on_device_of(model, one, varying_sizes(batches)))
        found.append(calibration)
    assert str(found[1].graphs.auto) == "compiled"
    for name, qparams in found[0].finalize().items():
        torch.testing.assert_close(qparams["scale"], found[1].finalize()[name]["scale"])


@Observer.register("test_root_mean_square")
class RootMeanSquare(Observer):
    """A user's observer with statistics of its own."""

    def update_statistics_from_observed(self, observed: torch.Tensor) -> None:
        spread = observed.float().square().mean(dim=(0, -1)).sqrt() * 3
        if self.has_statistics:
            spread = torch.maximum(spread, self.max_vals)
        self.min_vals, self.max_vals = -spread, spread


@pytest.mark.parametrize("name", ["mse", "test_root_mean_square"])
def test_searching_and_own_observers_inline(name: str) -> None:
    model = Telling()
    recipe = Recipe.from_preset("W8A8_STATIC", inputs={"observer": name})
    calibration = Calibration(model, recipe)
    compiled = torch.compile(model, backend=calibration.backend)
    (scheme,) = recipe.config.config_groups.values()
    eager = make_observer("input", scheme.input_activations)
    with torch.no_grad():
        for index in range(2):
            x = torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(index))
            eager(compiled(x)[0])
    found = calibration.statistics.snapshot()["up.input"].observer()
    torch.testing.assert_close(found.max_vals, eager.max_vals)
