"""Whether the Hessians of a model fit into memory, before hours are spent on gathering them."""

from pathlib import Path

from inlay.errors import ConfigurationError
from inlay.recipe import Plan
from inlay.report.numbers import size
from inlay.steps.weights import Weights

__all__ = ["require_room_for_hessians"]

_MEMORY = Path("/proc/meminfo")


def require_room_for_hessians(plan: Plan, weights: Weights) -> None:
    """Refuse GPTQ in memory if its Hessians cannot fit.

    :raises ConfigurationError: if they take more than the memory that is free now
    """
    if plan.recipe.gptq is None:
        return
    needed, free = _needed(plan, weights), _free()
    if free is not None and needed > free:
        raise ConfigurationError(
            f"GPTQ needs at least {size(needed)} for the Hessians of all layers, and {size(free)} "
            "of memory are free. Stream the model, which keeps those of one block at a time: "
            "--stream, or inlay.stream"
        )


def _needed(plan: Plan, weights: Weights) -> int:
    """Bytes of all Hessians in memory, counting layers as sharing one wherever they might."""
    found = set()
    for slot in plan.weight_slots():
        weight = weights.of_module(slot.module)
        if plan.compensates(slot.module) and weight.device.type == "cpu":
            found.add((slot.module.rpartition(".")[0], weight.shape[-1]))
    return sum(4 * columns**2 for _, columns in found)


def _free() -> int | None:
    """Bytes of memory that are free, or can be freed; None if the system does not say."""
    lines = _MEMORY.read_text(encoding="utf-8").splitlines() if _MEMORY.exists() else ()
    found = (int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    return next(found, None)
