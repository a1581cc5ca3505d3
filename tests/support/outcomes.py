"""Whether Inlay gets a small model of a type right: from statistics to the checkpoint."""

import traceback
from pathlib import Path
from typing import Any

import torch
from shrinking import batches_for, shrunk

import inlay
from inlay import Recipe
from inlay.checking import check_calibration
from inlay.errors import CheckError, InlayError

OUTCOMES = ("right", "refused", "wrong", "crashed", "not built")


def outcome_of(name: str, count: int = 2) -> tuple[str, str]:
    """Return the outcome for the models of a type, and what there is to say of it.

    :param count: how many batches to calibrate on
    """
    try:
        model = shrunk(name)
        batches = batches_for(model)[:count]
        with torch.no_grad():
            model(**batches[0])
    except Exception as error:
        return "not built", _gist(error)
    has_experts = any(part.dim() == 3 for part in model.parameters())
    # Servers run experts with FP8 inputs. All see tokens, wherever random routers send these.
    recipe = Recipe.from_preset("W8A8_STATIC")
    if has_experts:
        recipe = Recipe.from_preset("FP8", experts="fill")
    recipe = recipe.for_model(model)
    try:
        found = check_calibration(model, recipe, batches, tolerance=1e-5)
    except CheckError as error:
        return _refused_by_calibrate(model, recipe, batches) or ("wrong", _gist(error))
    except InlayError as error:
        return "refused", _gist(error)
    except Exception as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        return "crashed", f"{_gist(error)} ({Path(at.filename).name}, line {at.lineno})"
    return "right", "; ".join(found.left_out)


def _refused_by_calibrate(model: Any, recipe: Any, batches: list[Any]) -> tuple[str, str] | None:
    """Return why `inlay.calibrate`, which also checks the trace, refuses a model; None if not."""
    try:
        inlay.calibrate(model, recipe, batches, held_out=0, compiler="eager", progress=False)
    except inlay.InlayError as error:
        return "refused", _gist(error)
    return None


def _gist(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
