"""Equalization changes what is quantized, and nothing that the model computes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from blocks import SIZE, Blocks, Form
from families import FAMILIES, batch
from hypothesis import example, given
from hypothesis import strategies as st
from profiles import examples
from torch import nn
from torch.func import functional_call

from inlay import Calibration, Recipe
from inlay.recipe import Gathers, Slot

pytestmark = pytest.mark.slow

# Parameters of float64 models that compute their norms in float32 round there.
ROUNDED_BY_THE_MODEL = {"gemma3": 1e-6}

forms = st.builds(
    Form,
    norm=st.sampled_from(["layer", "rms", "gemma"]),
    mlp=st.sampled_from(["gated", "relu", "gelu"]),
    heads=st.sampled_from([1, 2, 4]),
    attention=st.sampled_from(["expand", "gqa", "matmul"]),
    bias=st.booleans(),
    fused=st.sampled_from(["", "row", "head"]),
)
parts = st.sampled_from([None, "before", "between", "o", "down"])
strengths = st.one_of(st.floats(0, 1), st.just("auto"))


def calibrated(model: nn.Module, strength: Any, **options: Any) -> Calibration:
    recipe = Recipe.from_preset("W8A8_STATIC", equalize=strength, **{"ignore": (), **options})
    return Calibration(model, recipe, compiler="eager", progress=False)


def parameters(calibration: Calibration) -> dict[str, torch.Tensor]:
    """The model's parameters as equalization leaves them."""
    equalized = calibration.equalization.parameters
    return {name: equalized.of(value) for name, value in calibration.model.named_parameters()}


def relative_error(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / one.norm())


def with_outliers(model: nn.Module) -> nn.Module:
    """Make a few channels much larger than others, as trained models have them."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(torch.where(torch.rand_like(parameter) < 0.05, 20.0, 1.0))
    return model.double().eval()


@given(form=forms, shared=parts, strength=strengths)
@example(form=Form(norm="gemma", heads=1, attention="gqa"), shared="down", strength=0.8)
@example(form=Form(mlp="relu"), shared="up", strength="auto")
@example(form=Form(fused="head", attention="gqa"), shared=None, strength=0.8)
@example(form=Form(fused="row"), shared=None, strength=0.8)
@examples(8)
@torch.no_grad()
def test_the_equalized_model_computes_what_the_model_computes(
    form: Form, shared: str | None, strength: Any
) -> None:
    model = with_outliers(Blocks(form, shared))
    before = {name: value.clone() for name, value in model.named_parameters()}
    calibration = calibrated(model, strength)
    x = torch.randn(2, 3, SIZE, dtype=torch.float64)
    calibration.observe(x)
    calibration.finalize()
    assert calibration.equalization.done
    equalized = parameters(calibration)
    assert relative_error(model(x), functional_call(model, equalized, (x,))) < 1e-9
    for name, value in model.named_parameters():
        assert torch.equal(value, before[name])
    # What is said to have changed is what did.
    changed = {name for name, value in equalized.items() if value is not before[name]}
    assert {n for n in changed if not torch.equal(equalized[n], before[n])} <= set(
        calibration.equalization.parameters.changed
    )


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "gpt2"])
@torch.no_grad()
def test_families(family: str) -> None:
    model = FAMILIES[family]()
    ignore = ["lm_head"] if hasattr(model, "lm_head") else []
    if family == "mixtral":
        model.set_experts_implementation("batched_mm")  # others do not take float64
        ignore.append("re:.*[.]experts[.].*")  # no server runs them with static INT8 inputs
    model = with_outliers(model)
    calibration = calibrated(model, 0.7, ignore=ignore)
    inputs = batch(model)
    if "pixel_values" in inputs:
        inputs = {"pixel_values": inputs["pixel_values"].double()}
    calibration.observe(**inputs)
    calibration.finalize()
    assert calibration.equalization.done
    plain, equalized = (
        model(**inputs)[0],
        functional_call(model, parameters(calibration), (), inputs)[0],
    )
    assert relative_error(plain, equalized) < ROUNDED_BY_THE_MODEL.get(family, 1e-9)


def phi3() -> nn.Module:
    from transformers import Phi3Config, Phi3ForCausalLM

    config = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 96}
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    return Phi3ForCausalLM(Phi3Config(**config, **sizes, pad_token_id=0))


def gpt_neox() -> nn.Module:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    config = {"num_attention_heads": 4, "vocab_size": 96, "hidden_act": "relu"}
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    return GPTNeoXForCausalLM(GPTNeoXConfig(**config, **sizes))


def falcon(**layout: Any) -> Callable[[], nn.Module]:
    return lambda: FAMILIES["falcon"](activation="relu", **layout)


# Rows of a weight as a grid, and which of them are values: with heads of size 8, Phi-3 has values
# after queries and keys, GPT-NeoX has them in every head, and Falcon has one head of values for
# all queries, or one for each head, or one for each group of heads.
FUSED = {
    "phi3": (phi3, ((64, 48, 16),)),
    "gpt_neox": (gpt_neox, ((4, 0, 4), (24, 16, 8))),
    "falcon": (falcon(), ((6, 5, 1), (8, 0, 8))),
    "falcon_by_head": (falcon(multi_query=False), ((4, 0, 4), (3, 2, 1), (8, 0, 8))),
    "falcon_by_group": (
        falcon(new_decoder_architecture=True, num_kv_heads=2),
        ((2, 0, 2), (4, 3, 1), (8, 0, 8)),
    ),
}


@pytest.mark.parametrize("name", FUSED)
@torch.no_grad()
def test_fused_projections(name: str) -> None:
    """Values among queries and keys, and up beside gate, are rows of one weight."""
    build, rows = FUSED[name]
    torch.manual_seed(0)
    model = with_outliers(build())
    calibration = calibrated(model, 0.7, ignore=["re:.*(lm_head|embed_out)"])
    inputs = batch(model)
    calibration.observe(**inputs)
    calibration.finalize()
    assert not calibration.equalization.refused
    # The output of attention reads values.
    by_rows = [each.group for each in calibration.equalization.done if each.group.producers[0].rows]
    values = [group for group in by_rows if "down" not in group.name]
    assert [group.producers[0].rows for group in values] == [rows, rows]
    plain, equalized = (
        model(**inputs)[0],
        functional_call(model, parameters(calibration), (), inputs)[0],
    )
    assert relative_error(plain, equalized) < 1e-9


@given(form=forms, strength=st.floats(0.1, 0.9))
@examples(3)
@torch.no_grad()
def test_ranges_are_those_of_the_equalized_model(form: Form, strength: float) -> None:
    """Ranges and ratios follow from channels; running the equalized model finds the same."""
    model = with_outliers(Blocks(form))
    x, y = torch.randn(2, 2, 3, SIZE, dtype=torch.float64)
    calibration = calibrated(model, strength)
    for value in (x, y):
        calibration.observe(value)
    calibration.finalize()
    scaled = with_outliers(Blocks(form))
    scaled.load_state_dict(parameters(calibration))
    again = calibrated(scaled, strength)
    for value in (x, y):
        again.observe(value)
    for each in calibration.equalization.done:
        slot = calibration.plan.of_module(each.group.name)["input"]
        ours, theirs = (c.statistics.of(slot) for c in (calibration, again))
        assert ours is not None
        assert theirs is not None
        for name in ("min_vals", "max_vals"):
            torch.testing.assert_close(ours.tensors[name], theirs.tensors[name])
        channels = again.statistics.of(Slot(each.group.name, "input", slot.args, Gathers.CHANNELS))
        assert channels is not None
        sizes = torch.maximum(channels.tensors["min_vals"].abs(), channels.tensors["max_vals"])
        assert each.after == pytest.approx(float(sizes.amax() / sizes.median()), rel=1e-9)


@torch.no_grad()
def test_shared_weights_change_only_if_all_uses_agree() -> None:
    x = torch.randn(2, 3, SIZE, dtype=torch.float64)

    def done(shared: str) -> Calibration:
        model = with_outliers(Blocks(Form(mlp="relu"), shared))
        calibration = calibrated(model, 0.7)
        calibration.observe(x)
        calibration.finalize()
        return calibration

    # Both blocks would divide the rows of `up` for their own `down`.
    calibration = done("up")
    assert not any("up." in name for name in calibration.equalization.parameters.changed)
    assert "blocks.0.up.weight is also used" in calibration.equalization.refused["blocks.1.down"]
    # A norm that both blocks share has readers in both, with scales of their own.
    assert "blocks.0.before.weight" not in done("before").equalization.parameters.changed
    # Nothing is shared: all four values of a block are equalized.
    assert len(done("none").equalization.done) == 8 + 1
