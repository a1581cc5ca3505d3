"""Define what to quantize and how: recipes, the slots they lead to, and their description."""

from inlay.recipe.describe import (
    format_in_words,
    left_in_words,
    recipe_text,
    scheme_in_words,
)
from inlay.recipe.owners import Locate
from inlay.recipe.plan import Plan
from inlay.recipe.presets import preset_names
from inlay.recipe.recipe import AUTO_STRENGTH, EXPERTS, Experts, Recipe, Strength
from inlay.recipe.slot import (
    BASE_NAMES,
    Gathers,
    Slot,
    channels_of,
    make_observer,
)

__all__ = [
    "AUTO_STRENGTH",
    "BASE_NAMES",
    "EXPERTS",
    "Experts",
    "Gathers",
    "Locate",
    "Plan",
    "Recipe",
    "Slot",
    "Strength",
    "channels_of",
    "format_in_words",
    "left_in_words",
    "make_observer",
    "preset_names",
    "recipe_text",
    "scheme_in_words",
]
