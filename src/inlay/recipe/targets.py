"""Choose the modules that a recipe quantizes, and their ports, as compressed-tensors does."""

from collections.abc import Iterable

from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.initialize import is_cached_attention_module
from compressed_tensors.utils.match import (
    is_match,
    is_narrow_match,
    match_named_modules,
    match_targets,
)
from torch import nn

from inlay.errors import ConfigurationError
from inlay.model import Layout, layout_of
from inlay.recipe.recipe import Recipe
from inlay.recipe.recognition import problem_with_product

__all__ = ["Ports", "own_layout", "quantized_ports", "refuse_unserved", "schemes_of"]

Ports = list[tuple[str, QuantizationArgs]]


def own_layout(name: str, module: nn.Module) -> Layout | None:
    """Return the layout of a module with one weight, if that can be quantized."""
    layout = layout_of(name, module)
    if layout is None or layout.kind == "grouped" or layout.problem(module) is not None:
        return None
    return layout


def refuse_unserved(model: nn.Module) -> None:
    """Refuse a model without any weight in a layout that a quantized checkpoint can hold."""
    unserved = {
        name: problem
        for name, module in model.named_modules()
        if (layout := layout_of(name, module)) is not None
        and layout.kind != "grouped"
        and (problem := layout.problem(module)) is not None
    }
    if unserved:
        name, problem = next(iter(unserved.items()))
        kind = type(model.get_submodule(name)).__name__
        raise ConfigurationError(
            f"{name} and {len(unserved) - 1} other modules of {type(model).__name__} are {kind}, "
            f"and {problem}. Nothing else is left to quantize; serve the model as it is, or copy "
            "the weights into Linear modules"
        )


def quantized_ports(
    model: nn.Module, recipe: Recipe, left: dict[str, str]
) -> Iterable[tuple[str, Ports, QuantizationScheme | None]]:
    """Yield modules with their quantized ports and schemes, as compressed-tensors chooses them.

    :param left: takes the modules that are targeted and cannot be quantized, with the reason
    """
    config = recipe.config
    attention: dict[str, tuple[Ports, QuantizationScheme | None]] = {}
    if config.kv_cache_scheme is not None:
        for name, module in model.named_modules():
            if is_cached_attention_module(module):
                attention[name] = [(port, config.kv_cache_scheme) for port in ("k", "v")], None
        if not attention:
            raise ConfigurationError(
                "the recipe quantizes the key-value cache, but the model has no attention module "
                "that takes one; leave kv_cache out"
            )

    schemes = schemes_of(recipe)
    for name, module in match_named_modules(model, schemes, config.ignore):
        scheme: QuantizationScheme = schemes[match_targets(name, module, schemes)[0]]
        if is_cached_attention_module(module) and is_narrow_match(model, scheme.targets, name):
            if scheme.input_activations is not None:
                ports = [(port, scheme.input_activations) for port in ("q", "k", "v")]
                attention[name] = ports, scheme
        elif own_layout(name, module) is not None:
            problem = problem_with_product(module)
            if problem is not None:
                left[name] = problem
                continue
            candidates = [
                ("weight", scheme.weights),
                ("input", scheme.input_activations),
                ("output", scheme.output_activations),
            ]
            if isinstance(module, nn.Embedding):  # embedding inputs are indices
                candidates = [port for port in candidates if port[0] != "input"]
            yield name, [(port, args) for port, args in candidates if args is not None], scheme
        elif any(
            is_match(name, module, target) and not target.startswith("re:")
            for target in scheme.targets
        ):
            raise ConfigurationError(
                f"{name} is a {type(module).__name__}; {_reason(name, module)}"
            )
        elif _holds_matrix(module):
            left[name] = f"it is a {type(module).__name__}, and {_reason(name, module)}"
    yield from ((name, ports, scheme) for name, (ports, scheme) in attention.items())


def _reason(name: str, module: nn.Module) -> str:
    """Say why a module that holds a matrix is not quantized."""
    layout = layout_of(name, module)
    problem = None if layout is None else layout.problem(module)
    return problem or "only Linear, Embedding and attention modules can be quantized"


def _holds_matrix(module: nn.Module) -> bool:
    """Whether a module has a weight that it may multiply by."""
    weight = module._parameters.get("weight")
    return weight is not None and weight.dim() in (2, 3)


def schemes_of(recipe: Recipe) -> dict[str, QuantizationScheme]:
    """The schemes of a recipe by target."""
    groups = recipe.config.config_groups.values()
    return {target: scheme for scheme in groups for target in scheme.targets}
