"""`torch.compile(model, backend="inlay", options={"recipe": …})`, and `inlay.finalize`."""

import inspect
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from torch.fx import GraphModule

from inlay.calibration import Calibration
from inlay.errors import ConfigurationError
from inlay.observers import QParamsDict
from inlay.recipe import Recipe
from inlay.torch_private import compile_options, compiler_named, module_behind

__all__ = ["calibration_of", "compile_by_name", "finalize"]

# Dynamo hands a backend that it finds by name nothing but a graph and the options. This is how the
# calibration that was begun there is found again from the model: no model, no entry.
_BEGUN: "WeakKeyDictionary[nn.Module, dict[str, Calibration]]" = WeakKeyDictionary()


def compile_by_name(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    **ignored: Any,
) -> Callable[..., Any]:
    """The backend `inlay`. Options: `recipe` (a Recipe, or a YAML file), and `compiler`."""
    options = options or {}
    unknown = sorted(set(options) - {"recipe", "compiler"})
    if unknown or "recipe" not in options:
        raise ConfigurationError(
            f'the backend "inlay" takes options {{"recipe": …, "compiler": …}}, of which recipe is '
            f"needed; got {sorted(options)}"
        )
    weights = [value for value in example_inputs if isinstance(value, nn.Parameter)]
    model = _model_being_run(weights)
    if model is None:
        # A graph without any weight, such as one between two graph breaks, has nothing to observe.
        plain = compiler_named(options.get("compiler", "inductor"))
        compiled: Callable[..., Any] = plain(gm, list(example_inputs))
        return compiled
    begun = _BEGUN.setdefault(model, {})
    key = _key(options)
    if key not in begun:
        recipe = options["recipe"]
        begun[key] = _Borrowing(
            model,
            recipe if isinstance(recipe, Recipe) else Recipe.from_yaml(recipe),
            compiler=options.get("compiler", "inductor"),
        )
    return begun[key].backend(gm, example_inputs)


class _Borrowing(Calibration):
    """A calibration that does not keep its model alive: `_BEGUN` would never let go of its key."""

    def __init__(self, model: nn.Module, recipe: Recipe, *, compiler: str) -> None:
        super().__init__(model, recipe, compiler=compiler)
        self._model = weakref.ref(model)


def calibration_of(compiled: nn.Module) -> Calibration:
    """The calibration that `backend="inlay"` began for a module, or for the model around it.

    :param compiled: what `torch.compile` returned, or the module that it was given
    """
    model = module_behind(compiled) or compiled
    begun = dict(_BEGUN.get(model, {})) or _begun_around(model)
    if len(begun) > 1 and model is not compiled:
        wanted = _key(compile_options(compiled))
        begun = {key: calibration for key, calibration in begun.items() if key == wanted}
    if len(begun) != 1:
        raise ConfigurationError(
            f'{len(begun)} calibrations of this model were begun with backend="inlay"'
            f"{_hint_at_parts(model)}{_hint_at_others(model)}; compile it so, run a batch, and "
            "pass what torch.compile returned"
        )
    return next(iter(begun.values()))


def finalize(compiled: nn.Module, *, accept: Collection[str] = ()) -> dict[str, QParamsDict]:
    """Finalize the calibration of a model that was compiled with `backend="inlay"`."""
    return calibration_of(compiled).finalize(accept=accept)


def _begun_around(part: nn.Module) -> dict[str, Calibration]:
    """Calibrations of models that the module is a part of."""
    return {
        key: calibration
        for model, begun in list(_BEGUN.items())
        if any(module is part for module in model.modules())
        for key, calibration in begun.items()
    }


def _hint_at_parts(model: nn.Module) -> str:
    compiled = (module_behind(part) or part for part in model.modules())
    count = sum(bool(_BEGUN.get(part)) for part in set(compiled))
    return (
        f" (but {count} of its parts were compiled alone: finalize each of them)" if count else ""
    )


def _hint_at_others(model: nn.Module) -> str:
    """Dynamo takes the graph of one model for another of the same class, if its guards hold."""
    if any(type(other) is type(model) and other is not model for other in list(_BEGUN)):
        return (
            f" (but one of another {type(model).__name__}, whose graph Dynamo may run for this "
            "model, too: call torch.compiler.reset() before you compile the next)"
        )
    return ""


def _model_being_run(weights: list[nn.Parameter]) -> nn.Module | None:
    """The module on the call stack that a graph with these weights belongs to.

    That is the module which `torch.compile` wrapped. A module that was compiled in place, with
    `module.compile`, cannot be told from those around it, so then it is the outermost one.
    """
    found = None
    frame = inspect.currentframe()
    while frame is not None:
        # Asking for the variables of a frame keeps them alive until it ends; most have no self.
        has_self = "self" in frame.f_code.co_varnames
        own = frame.f_locals.get("self") if has_self else None
        wrapped = module_behind(own)
        module = wrapped or own
        if isinstance(module, nn.Module) and module is not found:
            parameters = {id(parameter) for parameter in module.parameters()}
            if any(id(weight) in parameters for weight in weights):
                found = module
                if wrapped is not None:
                    return found
        frame = frame.f_back
    return found


def _key(options: Mapping[str, Any]) -> str:
    recipe = options.get("recipe")
    shown = str(Path(recipe)) if isinstance(recipe, (str, Path)) else str(id(recipe))
    return f"{shown} {options.get('compiler', 'inductor')}"
