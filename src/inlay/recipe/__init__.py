"""Define what to quantize and how: recipes, the slots they lead to, and their description."""

from inlay.recipe.describe import format_in_words, recipe_text, scheme_in_words
from inlay.recipe.plan import Plan
from inlay.recipe.presets import preset_names
from inlay.recipe.recipe import Recipe
from inlay.recipe.slot import BASE_NAMES, IMPORTANCE, Slot, make_observer

__all__ = [
    "BASE_NAMES",
    "IMPORTANCE",
    "Plan",
    "Recipe",
    "Slot",
    "format_in_words",
    "make_observer",
    "preset_names",
    "recipe_text",
    "scheme_in_words",
]
