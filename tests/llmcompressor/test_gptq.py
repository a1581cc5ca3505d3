"""GPTQModifier in Inlay's pipeline against llm-compressor's own."""

from typing import Any

import pytest
import torch
from families import llama, qwen3
from llmcompressor.modifiers.gptq import GPTQModifier
from peer import EAGER, GROUPS, HEAD, STATIC, assert_same_tensors, batches, qparams, quantized

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # what the peer warns of is theirs
]

DATA = batches(24)  # more tokens than columns, or ties depend on how the Hessian is inverted
RECIPES: dict[str, dict[str, Any]] = {
    "groups": {"weights": GROUPS},
    "imatrix": {"weights": {**GROUPS, "observer": "imatrix_mse"}},
    "channels": {"weights": {"num_bits": 8, "strategy": "channel"}},
    "static inputs": {
        "weights": {**GROUPS, "symmetric": False},
        "input_activations": {**STATIC, "observer": "static_minmax"},
    },
}


def modifier(name: str, **fields: Any) -> GPTQModifier:
    scheme = {"targets": ["Linear"], **RECIPES[name]}
    return GPTQModifier(config_groups={"a": scheme}, **{"ignore": [HEAD], **fields})


@pytest.mark.parametrize("name", RECIPES)
def test_the_same_integers_up_to_ties(name: str) -> None:
    """Scales are equal bit for bit; Hessians are summed in another order."""
    build = qwen3 if name == "channels" else llama
    expected = quantized(build(), modifier(name), "basic", DATA)
    found = quantized(build(), modifier(name), EAGER, DATA)
    assert_same_tensors(qparams(found), qparams(expected))
    rows = different = 0
    for key, weight in expected.state_dict().items():
        own = found.state_dict()[key]
        if not key.endswith("_proj.weight"):
            continue
        rows += len(weight)
        different += int((own != weight).any(-1).sum())
    assert rows
    assert different < 0.3 * rows


def test_it_does_not_run_the_modifiers_own_solver(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("the graph gathers Hessians, and not a hook")

    monkeypatch.setattr("llmcompressor.modifiers.gptq.base.accumulate_hessian", refuse)
    found = quantized(llama(), modifier("groups"), EAGER, DATA)
    plain = llama()
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(found.state_dict()[name], plain.state_dict()[name])
