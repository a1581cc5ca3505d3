"""`torch.compile(model, backend="inlay", options={"recipe": …})`, and `inlay.finalize`."""

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.eval_frame import OptimizedModule
from torch.fx import GraphModule

from inlay.calibration import Calibration
from inlay.errors import ConfigurationError
from inlay.observers import QParamsDict
from inlay.recipe import Recipe

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
    model = _outermost_model(weights)
    if model is None:
        # A graph without any weight, such as one between two graph breaks, has nothing to observe.
        plain: Callable[..., Any] = lookup_backend(options.get("compiler", "inductor"))
        compiled: Callable[..., Any] = plain(gm, list(example_inputs))
        return compiled
    begun = _BEGUN.setdefault(model, {})
    key = _key(options)
    if key not in begun:
        recipe = options["recipe"]
        begun[key] = Calibration(
            model,
            recipe if isinstance(recipe, Recipe) else Recipe.from_yaml(recipe),
            compiler=options.get("compiler", "inductor"),
        )
    return begun[key].backend(gm, example_inputs)


def calibration_of(compiled: nn.Module) -> Calibration:
    """The calibration of a model that was compiled with `backend="inlay"`."""
    model = compiled._orig_mod if isinstance(compiled, OptimizedModule) else compiled
    begun = _BEGUN.get(model, {})
    if len(begun) > 1 and isinstance(compiled, OptimizedModule):
        options = _options_of(compiled)
        begun = {key: value for key, value in begun.items() if key == _key(options)}
    if len(begun) != 1:
        raise ConfigurationError(
            f'{len(begun)} calibrations of this model were begun with backend="inlay"; compile it '
            "so, run a batch, and pass what torch.compile returned"
        )
    return next(iter(begun.values()))


def finalize(compiled: nn.Module, *, accept: Collection[str] = ()) -> dict[str, QParamsDict]:
    """Finalize the calibration of a model that was compiled with `backend="inlay"`."""
    return calibration_of(compiled).finalize(accept=accept)


def _outermost_model(weights: list[nn.Parameter]) -> nn.Module | None:
    """The largest module on the call stack that has the weights: the model being run."""
    found = None
    frame = inspect.currentframe()
    while frame is not None:
        module = frame.f_locals.get("self")
        if isinstance(module, OptimizedModule):
            module = module._orig_mod
        if isinstance(module, nn.Module) and module is not found:
            own = {id(parameter) for parameter in module.parameters()}
            if any(id(weight) in own for weight in weights):
                found = module
        frame = frame.f_back
    return found


def _options_of(compiled: OptimizedModule) -> Mapping[str, Any]:
    """The options that `torch.compile` was given, from behind its wrappers."""
    backend: Any = compiled.dynamo_ctx.callback
    while hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend
    options: Mapping[str, Any] = getattr(backend, "kwargs", {}).get("options", {})
    return options


def _key(options: Mapping[str, Any]) -> str:
    recipe = options.get("recipe")
    shown = str(Path(recipe)) if isinstance(recipe, (str, Path)) else str(id(recipe))
    return f"{shown} {options.get('compiler', 'inductor')}"
