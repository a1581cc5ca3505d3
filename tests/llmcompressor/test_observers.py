"""Inlay's observers in recipes of llm-compressor, by name."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from families import batch, llama
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.observers import Observer as PeerObserver
from llmcompressor.observers.fusion import FusionHandler
from peer import (
    EAGER,
    GROUPS,
    HEAD,
    STATIC,
    assert_same_tensors,
    preset,
    qparams,
    quantized,
    static,
)
from torch import nn

from inlay import Calibration, Recipe
from inlay.llmcompressor.observers import InlayObserver, counterpart, offer_observers
from inlay.observers import IMatrixMSEObserver, MemorylessMinMaxObserver, Observer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # what the peer warns of is theirs
]


@Observer.register("test_llmc_half")
class Half(MemorylessMinMaxObserver):
    """Half of the range: an observer of the user's own, with scales that tell it from others."""

    def measure(self, observed: torch.Tensor, valid: torch.Tensor | None = None) -> Any:
        return {name: value / 2 for name, value in super().measure(observed, valid).items()}


@Observer.register("test_llmc_importance")
class Importance(IMatrixMSEObserver):
    """A weight observer of the user's own that watches inputs."""


@Observer.register("test_llmc_list")
class Listing(Observer):
    """An observer that cannot be traced: it keeps a list."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.largest: list[float] = []

    @property
    def has_statistics(self) -> bool:
        return bool(self.largest)

    def update_statistics_from_observed(self, observed: torch.Tensor) -> None:
        self.largest.append(observed.abs().max().item())
        self.max_vals = torch.tensor([sum(self.largest) / len(self.largest)])
        self.min_vals = -self.max_vals


def small() -> nn.Module:
    return llama(num_hidden_layers=1)


@pytest.mark.parametrize("observer", ["histogram", "test_llmc_half", "test_llmc_list"])
def test_inputs(observer: str) -> None:
    """The same by graph, by the peer's hooks, and by Inlay alone."""
    data, targets = [batch(small(), index) for index in range(2)], ["re:.*(q|o|down)_proj"]
    found, expected = (
        qparams(quantized(small(), static(observer, targets), pipeline, data))
        for pipeline in (EAGER, "basic")
    )
    assert_same_tensors(found, expected)

    groups = static(observer, targets).resolved_config.config_groups
    recipe = Recipe.from_config({"config_groups": groups, "ignore": ["lm_head"]})
    model: Any = small()
    model.set_attn_implementation("eager")  # as the peer calibrates
    calibration = Calibration(model, recipe, compiler="eager")
    for one in data:
        calibration.observe(**one)
    for slot, own_qparams in calibration.finalize().items():
        for key, value in own_qparams.items():
            if isinstance(value, torch.Tensor):
                own = found[f"{slot}_{key}"]
                torch.testing.assert_close(own, value.to(own.dtype), rtol=0, atol=0)


def test_settings_reach_the_observer() -> None:
    def recipe(percentile: float) -> QuantizationModifier:
        kwargs = {"method": "percentile", "percentile": percentile}
        args = {**STATIC, "observer": "histogram", "observer_kwargs": kwargs}
        scheme = {"targets": ["Linear"], "input_activations": args}
        return QuantizationModifier(config_groups={"a": scheme}, ignore=[HEAD])

    wide, narrow = (qparams(quantized(small(), recipe(p), EAGER)) for p in (100.0, 60.0))
    assert all(float(narrow[name]) < float(wide[name]) for name in wide if "_scale" in name)


def test_weights_that_share_a_global_scale() -> None:
    """Inlay's half observes q, the peer's own k and v: one scale of scales for all."""
    groups = {
        "a": {**preset_fields("NVFP4", "test_llmc_half"), "targets": ["re:.*q_proj"]},
        "b": {**preset_fields("NVFP4", "memoryless_minmax"), "targets": ["re:.*(k|v)_proj"]},
    }
    found = quantized(small(), QuantizationModifier(config_groups=groups), EAGER).state_dict()
    prefix = "model.layers.0.self_attn."
    scales = [found[f"{prefix}{name}_proj.weight_global_scale"] for name in "qkv"]
    assert torch.equal(scales[0], scales[1])
    assert torch.equal(scales[0], scales[2])
    model: Any = small()
    layers = [getattr(model.model.layers[0].self_attn, f"{name}_proj") for name in "qkv"]
    largest = max(
        float(layer.weight.abs().max()) / (2 if layer is layers[0] else 1) for layer in layers
    )
    torch.testing.assert_close(float(scales[0]), 448 * 6 / largest, rtol=1e-6, atol=0)


def preset_fields(name: str, weight_observer: str) -> dict[str, Any]:
    (scheme,) = preset(name, weight_observer=weight_observer).resolved_config.config_groups.values()
    return scheme.model_dump()


def test_weights_by_an_observer_that_watches_inputs() -> None:
    """It does as imatrix_mse does, by graph and by hooks."""

    def recipe(observer: str) -> QuantizationModifier:
        weights = {**GROUPS, "observer": observer}
        scheme = {"targets": ["re:.*(q|down)_proj"], "weights": weights}
        return QuantizationModifier(config_groups={"a": scheme})

    expected = qparams(quantized(small(), recipe("imatrix_mse"), "basic"))
    uniform = qparams(quantized(small(), recipe("memoryless_mse"), "basic"))
    assert any(not torch.equal(expected[name], uniform[name]) for name in expected)
    for pipeline in ("basic", EAGER):
        assert_same_tensors(
            qparams(quantized(small(), recipe("test_llmc_importance"), pipeline)), expected
        )


def test_an_observer_of_both_registries() -> None:
    """Inlay gathers, and the peer's class computes the qparams."""

    @Observer.register("test_llmc_both")
    class Own(MemorylessMinMaxObserver):
        pass

    @PeerObserver.register("test_llmc_both")
    class Theirs(PeerObserver):
        def update_statistics_from_observed(self, observed: torch.Tensor) -> None:
            raise AssertionError("it is Inlay that observes")

        def get_qparams(self) -> Any:
            self.max_vals = self.max_vals * 2
            return super().get_qparams()

    offer_observers()  # leaves a name alone that is taken
    found = qparams(quantized(small(), static("test_llmc_both"), EAGER))
    plain = qparams(quantized(small(), static("memoryless_minmax"), EAGER))
    assert all(float(found[n]) > float(plain[n]) for n in found if n.endswith("input_scale"))


def test_observers_registered_later_are_found() -> None:
    @Observer.register("test_llmc_later")
    class Later(Half):
        pass

    assert "test-llmc-later" not in PeerObserver.registered_names()
    found = qparams(quantized(small(), static("test_llmc_later"), EAGER))
    assert_same_tensors(found, qparams(quantized(small(), static("test_llmc_half"), EAGER)))


def test_an_observer_in_their_place_keeps_their_contract() -> None:
    args = QuantizationArgs(num_bits=8, strategy="tensor")
    observer = PeerObserver.load_from_registry("histogram", base_name="input", args=args)
    assert isinstance(observer, InlayObserver)
    assert counterpart(observer).observer == "histogram"
    assert not observer.has_statistics
    value = torch.tensor([[-1.0, 3.0]])
    assert observer(value).has_statistics
    assert {name: float(v) for name, v in observer.get_statistics().items()} == {
        "min_vals": -1.0,
        "max_vals": 3.0,
    }
    assert set(observer.get_qparams()) == {"scale", "zero_point", "global_scale"}
    assert not observer.has_statistics  # theirs go when they have been used


def test_weights_are_observed_once() -> None:
    args = QuantizationArgs(num_bits=4, type="float", strategy="tensor_group", group_size=16)
    observers = [InlayObserver("weight", args, name="test_llmc_half") for _ in range(2)]
    layers = [nn.Linear(16, 2, bias=False) for _ in observers]
    FusionHandler.fuse(zip(observers, layers, strict=True))
    observers[0](layers[0].weight)
    observers[0](layers[0].weight * 100)
    first = observers[0].get_qparams()
    assert observers[1].has_statistics  # looked up for the scale of scales
    second = observers[1].get_qparams()
    assert torch.equal(first["global_scale"], second["global_scale"])
    assert not any(observer.has_statistics for observer in observers)


def test_without_llm_compressor() -> None:
    code = "import sys; sys.modules['llmcompressor'] = None; import inlay.llmcompressor"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "pip install 'inlay[llmcompressor]'" in done.stderr
