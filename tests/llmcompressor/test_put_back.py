"""Inlay leaves nothing behind: models, registries and sessions are as `basic` leaves them."""

from typing import Any

import pytest
import torch
from compressed_tensors.offload.cache import OffloadCache
from families import llama, mixtral
from llmcompressor.core import active_session
from llmcompressor.modifiers.utils.hooks import HooksMixin
from llmcompressor.observers import Observer as PeerObserver
from llmcompressor.pipelines import CalibrationPipeline
from peer import CACHE, EAGER, batches, grouped, preset, qparams, quantized, static
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from inlay.llmcompressor.observers import offer_observers
from inlay.llmcompressor.tracing import traceable

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # what the peer warns of is theirs
]

ATTENTION = ["re:.*self_attn.*_proj"]
RECIPES = {
    "inputs": static,
    "cache": lambda: preset("FP8", kv_cache_scheme=CACHE),
    "importance": lambda: grouped("imatrix_mse"),
    "two": lambda: [static(targets=["re:.*mlp.*"]), grouped("imatrix_mse", targets=ATTENTION)],
}


def anatomy(model: Any) -> dict[str, Any]:
    """All that could be left on a model, in words that do not depend on the run."""
    config = {"attention": model.config._attn_implementation, "cache": model.config.use_cache}
    parts: dict[str, dict[str, Any]] = {"config": config}
    for name, module in model.named_modules():
        own = dict(vars(module))
        for gathered in ("min_vals", "max_vals"):  # an observer's, up to an error
            own.pop(gathered, None)
        if own.get("forward") == nn.Linear.forward.__get__(module):
            del own["forward"]  # the peer leaves it on the head of a language model
        parts[name] = {
            "type": type(module),
            "attributes": sorted(own),
            "training": module.training,
            "hooks": [_words(hook) for hook in module._forward_pre_hooks.values()]
            + [_words(hook) for hook in module._forward_hooks.values()],
            "forward": _words(own.get("forward")),
            "offloaded": isinstance(own["_parameters"], OffloadCache),
            "parameters": sorted(own["_parameters"]),
            "enabled": getattr(module, "quantization_enabled", None),
            "status": getattr(module, "quantization_status", None),
        }
    return parts


def _words(function: Any) -> str:
    return f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', '')}"


def surroundings() -> dict[str, Any]:
    offer_observers()  # a run offers those that were registered with Inlay since the last one
    return {
        "observers": {n: PeerObserver.get_value_from_registry(n) for n in _names(PeerObserver)},
        "pipelines": _names(CalibrationPipeline),
        "attention": sorted(ALL_ATTENTION_FUNCTIONS),
        "hooks": HooksMixin._HOOKS_DISABLED,
    }


def _names(registry: Any) -> list[str]:
    return sorted(registry.registered_names())


@pytest.mark.parametrize("recipe", RECIPES)
def test_after_a_run(recipe: str) -> None:
    model, other = llama(num_hidden_layers=1), llama(num_hidden_layers=1)
    before = surroundings()
    quantized(model, RECIPES[recipe](), EAGER)
    assert surroundings() == before
    assert len(active_session().lifecycle.recipe.modifiers) == (2 if recipe == "two" else 1)
    # The peer's `basic` cannot run the recipe with two of them.
    quantized(other, RECIPES[recipe](), "independent" if recipe == "two" else "basic")
    found, expected = anatomy(model), anatomy(other)
    if recipe == "two":  # which moves models into caches that onload weights
        for part in (*found.values(), *expected.values()):
            for name in ("attributes", "forward", "offloaded"):
                part.pop(name, None)
    assert found == expected


@pytest.mark.parametrize("family", [llama, mixtral])
@pytest.mark.parametrize("recipe", ["inputs", "cache", "importance"])
def test_after_an_error_in_the_middle(recipe: str, family: Any) -> None:
    """Hooks, forwards and observers stand where an error in `basic` leaves them."""
    found = {}
    for pipeline in ("basic", EAGER):
        model = family(num_hidden_layers=1)
        data = batches()
        data[1]["input_ids"][0, 0] = 1000  # there is no such token
        before = surroundings()
        with pytest.raises(IndexError):
            quantized(model, RECIPES[recipe](), pipeline, data)
        assert surroundings() == before
        found[pipeline] = anatomy(model)
    assert any(part.get("hooks") for part in found[EAGER].values())
    assert found[EAGER] == found["basic"]


def test_a_model_can_be_quantized_after_an_error() -> None:
    model = llama(num_hidden_layers=1)
    data = batches()
    data[1]["input_ids"][0, 0] = 1000
    with pytest.raises(IndexError):
        quantized(model, static(), EAGER, data)
    expected = qparams(quantized(llama(num_hidden_layers=1), static(), "basic"))
    found = qparams(quantized(model, static(), "basic"))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_hooks_of_others_stay_and_keep_their_order() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    calls: list[str] = []
    handles = [
        model[0].register_forward_pre_hook(lambda module, args, name=name: calls.append(name))
        for name in "abc"
    ]
    with traceable(model, handles[1:2], states=False):
        model(torch.ones(1, 2))
    assert calls == ["a", "c"]
    model(torch.ones(1, 2))
    assert calls == ["a", "c", "a", "b", "c"]


def test_a_forward_of_the_users_own_stays() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].forward = lambda input: input * 2  # type: ignore[method-assign]
    with traceable(model, (), states=False):
        assert torch.equal(model(torch.ones(1, 2)), torch.full((1, 2), 2.0))
