"""The recipe of a choice of formats, as YAML for Inlay, llm-compressor and vLLM."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import yaml
from compressed_tensors.quantization import QuantizationConfig

from inlay.compensation.settings import GPTQ
from inlay.recipe import Recipe
from inlay.searching.formats import Format
from inlay.searching.scores import Scores
from inlay.searching.solving import Choice

__all__ = ["mixed_recipe", "modifier_text"]


def mixed_recipe(
    scores: Scores, choice: Choice, formats: Sequence[Format], gptq: GPTQ | None
) -> Recipe:
    """Return the recipe that gives each unit its format.

    Groups are named group_0, group_1, … because vLLM tells them apart by such names alone.
    """
    targets: dict[int, list[str]] = {}
    plain = list(scores.left)
    for number, unit in enumerate(scores.units):
        place = scores.format_of(number, choice)
        if formats[place].is_plain:
            plain += unit.targets
        else:
            targets.setdefault(place, []).extend(unit.targets)
    groups = {
        f"group_{number}": formats[place].targeting(targets[place])
        for number, place in enumerate(sorted(targets))
    }
    config = QuantizationConfig(config_groups=groups, ignore=plain)
    return Recipe.from_config(config, gptq=gptq if groups else None)


def modifier_text(recipe: Recipe, comments: Iterable[str] = ()) -> str:
    """Write a recipe as the YAML of llm-compressor, which Inlay reads too.

    :param comments: lines to put in front
    """
    config = recipe.config
    fields: dict[str, Any] = {
        "config_groups": {
            name: _without_defaults(scheme.model_dump(mode="json", exclude_none=True))
            for name, scheme in config.config_groups.items()
        },
        "ignore": list(config.ignore or ()),
    }
    name = "QuantizationModifier"
    if recipe.gptq is not None:
        name = "GPTQModifier"
        fields["dampening_frac"] = recipe.gptq.damping
    content = {"quant_stage": {"quant_modifiers": {name: fields}}}
    lines = "".join(f"# {line}\n" for line in comments)
    return lines + str(yaml.safe_dump(content, sort_keys=False, allow_unicode=True))


def _without_defaults(fields: Any) -> Any:
    """Drop empty entries, which compressed-tensors fills in again."""
    if not isinstance(fields, Mapping):
        return fields
    parts = {key: _without_defaults(value) for key, value in fields.items()}
    return {key: value for key, value in parts.items() if value not in (None, {}, [])}
