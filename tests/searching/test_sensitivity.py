"""E[g²] of layers, against gradients that hooks and parameters give."""

import copy

import pytest
import torch
import torch.nn.functional as F
from families import bert, llama, qwen3_moe
from torch import nn

from inlay import Recipe
from inlay.errors import ConfigurationError
from inlay.recipe import Plan
from inlay.searching.sensitivity import sensitivities

IDS = torch.randint(0, 90, (2, 9), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(IDS)
MASK[1, 6:] = 0
VALID = MASK.bool().flatten()


def plan_of(model: nn.Module) -> Plan:
    return Plan(model, Recipe.from_preset("W8A16", weights={"strategy": "channel"}))


def by_hooks(model: nn.Module, names: list[str]) -> dict[str, torch.Tensor]:
    """Return the gradient of the surprise at sampled labels, for each token, by layer."""
    model = copy.deepcopy(model)
    kept: dict[str, torch.Tensor] = {}

    def keep(name: str, output: torch.Tensor) -> None:
        output.retain_grad()
        kept[name] = output

    for name in names:
        model.get_submodule(name).register_forward_hook(
            lambda _, __, output, name=name: keep(name, output)
        )
    logits = model(input_ids=IDS, attention_mask=MASK).logits.flatten(0, 1)
    generator = torch.Generator().manual_seed(0)
    labels = torch.multinomial(logits.detach().softmax(-1), 1, generator=generator).flatten()
    F.cross_entropy(logits[VALID], labels[VALID], reduction="sum").backward()
    return {name: output.grad.flatten(0, 1)[VALID] for name, output in kept.items()}


@pytest.mark.parametrize(
    ("trained", "depth"), [(True, 2), (False, 2), (False, 1)], ids=["plain", "frozen", "no blocks"]
)
def test_layers_of_a_language_model(trained: bool, depth: int) -> None:
    model = llama(initializer_range=0.25, num_hidden_layers=depth).requires_grad_(trained)
    before = {name: each.clone() for name, each in model.state_dict().items()}
    plan = plan_of(model)
    found = sensitivities(model, plan, [{"input_ids": IDS, "attention_mask": MASK}])
    assert found.keys() == plan.weights.keys()
    for name, gradient in by_hooks(model.requires_grad_(), list(found)).items():
        assert found[name].rows == int(VALID.sum())
        torch.testing.assert_close(
            found[name].mean, gradient.double().square().mean(0), rtol=1e-3, atol=1e-9
        )
    assert all(each.grad is None for each in model.parameters())
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())


def test_experts_get_the_gradients_of_their_own_tokens() -> None:
    """With one token, the gradient of a weight is that of its output times its input."""
    model = qwen3_moe(initializer_range=0.25, num_hidden_layers=2)
    ids = IDS[:1, :1]
    plan = plan_of(model)
    found = sensitivities(model, plan, [{"input_ids": ids}])
    inputs: list[torch.Tensor] = []
    model.model.layers[1].mlp.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    logits = model(input_ids=ids).logits[0]
    generator = torch.Generator().manual_seed(0)
    label = torch.multinomial(logits.detach().softmax(-1), 1, generator=generator).flatten()
    F.cross_entropy(logits, label).backward()
    experts = model.model.layers[1].mlp.experts
    power = inputs[0].double().square().sum()
    seen = []
    for index, gradient in enumerate(experts.gate_up_proj.grad.double()):
        gate, up = (gradient.square().sum(-1) / power).chunk(2)
        for projection, expected in (("gate_proj", gate), ("up_proj", up)):
            own = found[f"model.layers.1.mlp.experts.{index}.{projection}"]
            torch.testing.assert_close(own.mean, expected, rtol=1e-3, atol=1e-12)
            seen.append(own.rows)
    assert sorted(seen) == [0, 0, 0, 0, 1, 1, 1, 1]  # each token goes to two of four


def test_encoders_count_their_vectors_as_means() -> None:
    model = bert(initializer_range=0.25)
    batch = {"input_ids": IDS, "attention_mask": MASK}
    found = sensitivities(model, plan_of(model), [batch])
    assert "pooler.dense" not in found  # nothing that counts depends on it
    # The last layer stands before a norm, whose gradient removes the mean.
    last = found["encoder.layer.1.output.dense"]
    assert last.rows == int(VALID.sum())
    assert float(last.mean.min()) > 0


def test_models_that_predict_nothing_are_refused() -> None:
    class Alone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(x)

    with pytest.raises(ConfigurationError, match=r"neither logits nor .*--forward-only"):
        sensitivities(Alone(), plan_of(Alone()), [{"x": torch.ones(2, 4)}])
