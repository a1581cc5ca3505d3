"""What Inlay does not calibrate runs as it would without Inlay, and a warning says so."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.offload import offload_module
from families import llama
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.pruning.sparsegpt import SparseGPTModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier
from llmcompressor.observers import MinMaxObserver as PeerMinMaxObserver
from llmcompressor.observers import Observer as PeerObserver
from peer import EAGER, HEAD, assert_same_tensors, preset, quantized, static
from torch import nn
from transformers import BertConfig, PreTrainedModel

from inlay.llmcompressor.fallback import problem_with, problem_with_model
from inlay.llmcompressor.tracing import is_in_place

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # what the peer warns of is theirs
]

MLP = ["re:.*mlp.*"]
PROJECTIONS = ["re:.*self_attn.*_proj"]


def small() -> nn.Module:
    return llama(num_hidden_layers=1)


def run(
    recipe: Any, pipeline: str = EAGER, model: nn.Module | None = None
) -> tuple[Any, list[str]]:
    """The quantized model, and what Inlay warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = quantized(model or small(), recipe, pipeline)
    said = [str(warning.message) for warning in caught]
    return found, [text for text in said if "Inlay" in text or "traced model" in text]


MIXED: dict[str, tuple[Callable[[], list[Any]], list[str]]] = {
    "GPTQ": (
        lambda: [
            GPTQModifier(scheme="W8A8", targets=MLP, actorder=None),
            static(targets=PROJECTIONS),
        ],
        ["GPTQModifier"],
    ),
    "SmoothQuant": (
        lambda: [SmoothQuantModifier(smoothing_strength=0.8), static("minmax")],
        ["SmoothQuantModifier"],
    ),
    "between": (
        lambda: [
            static(targets=PROJECTIONS),
            SparseGPTModifier(sparsity=0.5, targets=MLP),
            preset("FP8", targets=MLP),
        ],
        ["SparseGPTModifier"],
    ),
}


@pytest.mark.parametrize("name", MIXED)
def test_other_modifiers_run_as_ever_and_the_rest_in_inlay(name: str) -> None:
    recipe, left_alone = MIXED[name]
    expected, _ = run(recipe(), "independent")
    found, said = run(recipe())
    assert_same_tensors(found.state_dict(), expected.state_dict())
    assert [text.partition(" ")[0] for text in said] == left_alone
    reason = "it sets actorder" if name == "GPTQ" else "it needs more of the data than statistics"
    assert f" runs in SequentialPipeline and not in Inlay: {reason}" in said[0]


def test_nothing_is_said_where_all_is_inlays() -> None:
    _, said = run([static(targets=MLP), preset("FP8", targets=PROJECTIONS)])
    assert said == []


class OwnDefaults(QuantizationModifier):
    def on_initialize(self, state: Any, **kwargs: Any) -> bool:
        return super().on_initialize(state, **kwargs)


class OwnEpoch(QuantizationModifier):
    def on_sequential_epoch_end(self, state: Any, event: Any, modules: Any, **kwargs: Any) -> None:
        super().on_sequential_epoch_end(state, event, modules, **kwargs)


def test_subclasses_are_taken_as_long_as_they_use_data_alike() -> None:
    assert problem_with(OwnDefaults(scheme="FP8")) is None
    assert problem_with(OwnEpoch(scheme="FP8")) == (
        "it does more than QuantizationModifier in on_sequential_epoch_end"
    )


@PeerObserver.register("test_theirs_alone")
class TheirsAlone(PeerMinMaxObserver):
    """An observer that Inlay has never heard of."""


@PeerObserver.register("test_looks_elsewhere")
class LooksElsewhere(PeerMinMaxObserver):
    """An observer of weights with a hook of its own."""

    def attach(self, module: nn.Module) -> None:
        self.handle = module.register_forward_pre_hook(lambda module, args: None)

    def detach(self, module: nn.Module) -> None:
        self.handle.remove()


def test_an_observer_that_inlay_does_not_know() -> None:
    expected, _ = run(static("test_theirs_alone"), "independent")
    found, said = run(static("test_theirs_alone"))
    assert_same_tensors(found.state_dict(), expected.state_dict())
    (text,) = said
    assert "Inlay does not know the observer TheirsAlone" in text


def test_warnings_point_at_who_called_oneshot() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        quantized(small(), static("test_theirs_alone"), EAGER)
        quantized(Hidden(), static(targets=["down"]), EAGER)
    places = [w.filename for w in caught if "Inlay:" in str(w.message) or "hooks" in str(w.message)]
    assert [Path(place).name for place in places] == ["peer.py", "peer.py"]


def test_of_weights_any_observer_is_taken_that_sees_weights_alone() -> None:
    recipe = preset("FP8", weight_observer="test_theirs_alone")
    assert problem_with(recipe) is None
    expected, _ = run(preset("FP8", weight_observer="test_theirs_alone"), "basic")
    found, said = run(recipe)
    assert said == []
    assert_same_tensors(found.state_dict(), expected.state_dict())
    other = preset("FP8", weight_observer="test_looks_elsewhere")
    assert problem_with(other) == "the observer LooksElsewhere has hooks of its own"


def test_settings_that_inlay_refuses() -> None:
    scheme = {
        "targets": ["Linear"],
        "input_activations": {
            "num_bits": 8,
            "observer": "mse",
            "observer_kwargs": {"maxshrink": 1.5},
        },
    }
    problem = problem_with(QuantizationModifier(config_groups={"a": scheme}, ignore=[HEAD]))
    assert problem is not None
    assert "maxshrink must be a number from 0 to 1, got 1.5" in problem


def test_offloaded_weights() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    offload_module(model[0], "cpu", "cpu")
    assert is_in_place(model)
    assert problem_with_model(model) is None
    offload_module(model[1], "meta", "cpu")  # used elsewhere than it is kept
    assert not is_in_place(model)
    assert "weights of the model are offloaded" in str(problem_with_model(model))


class Product(nn.Linear):
    """A Linear that no graph shows as one: it computes its product in parts."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return (input.unsqueeze(-2) * self.weight).sum(-1) + self.bias


class Hidden(PreTrainedModel):
    def __init__(self) -> None:
        super().__init__(BertConfig())
        torch.manual_seed(0)
        self.embedding = nn.Embedding(96, 8)
        self.up, self.down = nn.Linear(8, 8), Product(8, 8)
        self.last = nn.Linear(8, 8)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return self.last(self.down(torch.relu(self.up(self.embedding(input_ids)))))


@pytest.mark.parametrize("observer", ["minmax", "histogram"])
def test_hooks_observe_what_the_graph_does_not_show(observer: str) -> None:
    targets = ["re:up|down|last"]
    expected = quantized(Hidden(), static(observer, targets=targets), "basic")
    found, said = run(static(observer, targets=targets), model=Hidden())
    (text,) = said
    assert text.startswith("the traced model does not show down.input; hooks observe them")
    assert_same_tensors(found.state_dict(), expected.state_dict())
