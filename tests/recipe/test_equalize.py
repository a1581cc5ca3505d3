"""How a recipe asks for equalization."""

import pytest
from graphs import Functional, linear
from torch import nn

from inlay import Recipe
from inlay.errors import ConfigurationError
from inlay.recipe import Plan, recipe_text

MODIFIERS = """
stage:
  modifiers:
    SmoothQuantModifier:
      smoothing_strength: 0.8
    QuantizationModifier:
      scheme: W8A8
      targets: [Linear]
"""


def test_every_way_to_say_it() -> None:
    by_preset = Recipe.from_preset("W8A8_STATIC", ignore=(), equalize=0.8)
    by_yaml = Recipe.from_yaml("preset: W8A8_STATIC\nequalize: 0.8\n")
    by_config = Recipe.from_config(by_preset.config, equalize=0.8)
    by_fields = Recipe.from_config(by_preset.fields)
    assert by_preset == by_yaml == by_config == by_fields
    assert Recipe.from_yaml("preset: W8A8_STATIC\n", equalize="auto").equalize == "auto"
    again = Recipe.from_yaml("preset: W8A8_STATIC\nequalize: 0.8\n", equalize=0.5)
    assert again.equalize == 0.5


@pytest.mark.parametrize("strength", [None, 0.3, "auto"])
def test_what_is_written_is_what_is_read(strength: float | str | None) -> None:
    recipe = Recipe.from_preset("W8A8_STATIC", equalize=strength)
    again = Recipe.from_yaml(recipe_text(recipe))
    assert again.equalize == strength
    assert recipe.fields.get("equalize") == strength
    assert Recipe.from_config(recipe.fields) == recipe


def test_smoothquant_of_llm_compressor() -> None:
    assert Recipe.from_yaml(MODIFIERS).equalize == 0.8
    default = MODIFIERS.replace("smoothing_strength: 0.8", "num_calibration_steps: 10")
    assert Recipe.from_yaml(default).equalize == 0.5
    mapped = MODIFIERS.replace(
        "smoothing_strength: 0.8", "mappings: [[['re:.*q_proj'], 're:.*norm']]"
    )
    with pytest.warns(UserWarning, match="mappings are not needed and not read"):
        Recipe.from_yaml(mapped)
    with pytest.raises(ConfigurationError, match="ignore"):
        Recipe.from_yaml(MODIFIERS.replace("smoothing_strength: 0.8", "ignore: [lm_head]"))
    alone = MODIFIERS.partition("    QuantizationModifier")[0]
    with pytest.raises(ConfigurationError, match="reads one QuantizationModifier or"):
        Recipe.from_yaml(alone)


@pytest.mark.parametrize("strength", [-0.1, 1.5, "most", True, float("nan")])
def test_strengths_that_are_none(strength: object) -> None:
    with pytest.raises(ConfigurationError, match="a number from 0 to 1"):
        Recipe.from_preset("W8A8_STATIC", equalize=strength)


def test_inputs_are_observed_so_that_ranges_follow() -> None:
    args = Recipe.from_preset("W8A8_STATIC", equalize=0.5).config.config_groups["group_0"]
    assert args.input_activations.observer == "static_minmax"
    named = Recipe.from_preset("W8A8_STATIC", inputs={"observer": "histogram"}, equalize=0.5)
    assert named.config.config_groups["group_0"].input_activations.observer == "histogram"
    model = Functional(lambda self, x: self.fc(x), fc=linear())
    assert Plan(model, named).needs_second_run
    assert not Plan(model, Recipe.from_preset("W8A8_STATIC", equalize=0.5)).needs_second_run


def test_there_must_be_inputs_to_equalize() -> None:
    model = nn.Sequential(nn.Embedding(8, 128))
    with pytest.raises(ConfigurationError, match="quantizes no Linear that reads"):
        Plan(model, Recipe.from_preset("W4A16", targets=["Embedding"], equalize=0.5))
