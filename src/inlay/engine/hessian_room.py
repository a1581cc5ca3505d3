"""Check that the Hessians of a model fit into memory, before hours are spent on gathering them."""

import warnings
from pathlib import Path

from torch import nn

from inlay.collectives import from_all_ranks
from inlay.errors import ConfigurationError
from inlay.recipe import Plan, Recipe
from inlay.report.numbers import size

__all__ = ["reason_to_stream", "require_room_for_hessians"]

_MEMORY = Path("/proc/meminfo")
# A model is streamed if its Hessians take more than this part of the free memory.
_BUDGET = 1 / 4


def reason_to_stream(model: nn.Module, recipe: Recipe) -> str | None:
    """Say why a model should be streamed; None if it can run in memory.

    Streaming keeps the Hessians of one block at a time, and gives the same result. All ranks call
    this, and all get the answer of the rank with the least memory.
    """
    if recipe.gptq is None:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the calibration warns of the same plan
        needed = _needed(Plan(model, recipe), model)
    known = [free for free in from_all_ranks(_free()) if free is not None]
    if all(needed <= free * _BUDGET for free in known):
        return None
    return (
        f"GPTQ needs {size(needed)} for the Hessians of all layers, more than a quarter of the "
        "free memory"
    )


def require_room_for_hessians(plan: Plan, model: nn.Module) -> None:
    """Refuse GPTQ in memory if its Hessians cannot fit.

    :raises ConfigurationError: if they take more than the memory that is free now
    """
    if plan.recipe.gptq is None:
        return
    needed, free = _needed(plan, model), _free()
    if free is not None and needed > free:
        raise ConfigurationError(
            f"GPTQ needs at least {size(needed)} for the Hessians of all layers, and {size(free)} "
            "of memory are free. Stream the model, which keeps those of one block at a time: "
            "--stream, or inlay.stream"
        )


def _needed(plan: Plan, model: nn.Module) -> int:
    """Bytes of all Hessians in memory, counting layers as sharing one wherever they might."""
    gptq = plan.recipe.gptq
    assert gptq is not None
    found = set()
    for slot in plan.weight_slots():
        view = plan.weights[slot.module]
        device = model.get_parameter(view.parameter).device
        if plan.compensates(slot.module) and device.type == "cpu":
            found.add((slot.module.rpartition(".")[0], view.shape[-1]))
    copies = 2 if gptq.chooses_damping else 1
    return sum(4 * copies * columns**2 for _, columns in found)


def _free() -> int | None:
    """Bytes of memory that are free, or can be freed; None if the system does not say."""
    lines = _MEMORY.read_text(encoding="utf-8").splitlines() if _MEMORY.exists() else ()
    found = (int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    return next(found, None)
