"""Private parts of transformers: names that it keeps on models, and the name of an op."""

from typing import Any

__all__ = ["GROUPED_PRODUCT", "left_out_of_saving", "tied_names"]

# transformers 5.0 multiplies groups of rows by stacked weights with its own op where torch has none
# for the device. The name is private. Without it, such weights are refused as an unknown op.
GROUPED_PRODUCT = "transformers.grouped_mm_fallback"


def left_out_of_saving(model: Any) -> tuple[str, ...]:
    """Return the names of tensors that a model's class never saves.

    transformers 4.0; without it, a checkpoint would also hold buffers that the model computes.
    """
    return tuple(getattr(model, "_keys_to_ignore_on_save", None) or ())


def tied_names(model: Any) -> dict[str, str]:
    """Return the names of tied parameters, each with the name of the parameter it is tied to.

    The dictionary is the model's own. transformers 5.0; documented nowhere. Other models have none.
    Without it, tied weights that a file holds twice stay untied.
    """
    tied: dict[str, str] | None = getattr(model, "all_tied_weights_keys", None)
    return {} if tied is None else tied
