"""Weight views: the matrices of a model, wherever its parameters keep them."""

from inlay.model.layouts import KINDS, PRODUCTS, Layout, layout_of
from inlay.model.saved_names import saved_names
from inlay.model.stacks import StackedLinear, find_stacks, modules_with_stacks
from inlay.model.weight import Stack, Weight

__all__ = [
    "KINDS",
    "PRODUCTS",
    "Layout",
    "Stack",
    "StackedLinear",
    "Weight",
    "find_stacks",
    "layout_of",
    "modules_with_stacks",
    "saved_names",
]
