"""Describe recipes and formats in words."""

from collections.abc import Mapping
from typing import Any

import yaml
from compressed_tensors.quantization import (
    DynamicType,
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    QuantizationStrategy,
)

from inlay.formats.numbers import name_of
from inlay.observers import default_observer
from inlay.recipe.recipe import Recipe

__all__ = [
    "format_in_words",
    "left_in_words",
    "method_in_words",
    "recipe_text",
    "scheme_in_words",
]

# Fields that do not say how to quantize, or are derived from the others.
_STATE_OF_CONFIG = {"format", "global_compression_ratio", "quant_method", "quantization_status"}


def left_in_words(left: Mapping[str, str]) -> list[str]:
    """Say which modules stay in full precision, those with the same reason together.

    :param left: the reasons by module
    """
    alike: dict[str, list[str]] = {}
    for name, reason in left.items():
        alike.setdefault(reason, []).append(name)
    return [
        f"{names[0]} stays in full precision: {reason}"
        if len(names) == 1
        else f"{names[0]} and {len(names) - 1:,} more stay in full precision: {reason}"
        for reason, names in alike.items()
    ]


def format_in_words(args: QuantizationArgs, base_name: str) -> str:
    """Describe how a value is quantized, such as "int8 per tensor, asymmetric, static"."""
    parts = [f"{name_of(args)} {_strategy(args)}", "symmetric" if args.symmetric else "asymmetric"]
    if base_name != "weight":
        parts.append(_when(args))
    return ", ".join(parts)


def scheme_in_words(config: QuantizationConfig) -> str:
    """Summarize the schemes of a recipe, such as "W8A8 int, static"."""
    schemes = dict.fromkeys(_scheme(scheme) for scheme in config.config_groups.values())
    words = " and ".join(schemes)
    if config.kv_cache_scheme is not None:
        words += f", {name_of(config.kv_cache_scheme)} kv cache"
    return words


def method_in_words(recipe: Recipe) -> str:
    """Say how weights are rounded, such as "GPTQ (damping 0.05), ranges by imatrix_mse"."""
    weights = [scheme.weights for scheme in recipe.config.config_groups.values()]
    named = [str(args.observer or default_observer("weight")) for args in weights if args]
    observers = ", ".join(dict.fromkeys(named)) or "none are quantized"
    if recipe.gptq is None:
        return f"rounded to nearest, ranges by {observers}"
    return f"GPTQ (damping {recipe.gptq.damping}), ranges by {observers}"


def recipe_text(recipe: Recipe) -> str:
    """Write a recipe as YAML that `Recipe.from_yaml` reads, without unset fields."""
    config = recipe.config.model_dump(mode="json", exclude=_STATE_OF_CONFIG)
    content = {**config, **recipe.own_fields}
    text: str = yaml.safe_dump(
        _without_empty(content), sort_keys=False, default_flow_style=None, allow_unicode=True
    )
    return text


def _strategy(args: QuantizationArgs) -> str:
    if args.strategy == QuantizationStrategy.TENSOR_GROUP:
        return f"in groups of {args.group_size} under a global scale"
    if args.strategy == QuantizationStrategy.GROUP:
        return f"in groups of {args.group_size}"
    if args.strategy == QuantizationStrategy.BLOCK:
        return f"in blocks of {' by '.join(map(str, args.block_structure))}"
    if args.strategy == QuantizationStrategy.ATTN_HEAD:
        return "per head"
    return f"per {_value(args.strategy)}"


def _when(args: QuantizationArgs) -> str:
    """Describe when scales are computed."""
    if args.dynamic == DynamicType.LOCAL:
        return "dynamic in each group"
    return "dynamic" if args.dynamic else "static"


def _scheme(scheme: QuantizationScheme) -> str:
    weights, inputs = scheme.weights, scheme.input_activations
    if weights is None and inputs is None:
        return "outputs only"
    # Write values that are not quantized as 16 bits, whatever the dtype of the model.
    bits = [16 if args is None else args.num_bits for args in (weights, inputs)]
    types = dict.fromkeys(_value(args.type) for args in (weights, inputs) if args is not None)
    words = f"W{bits[0]}A{bits[1]} {'/'.join(types)}"
    return words if inputs is None else f"{words}, {'dynamic' if inputs.dynamic else 'static'}"


def _value(member: Any) -> str:
    return str(getattr(member, "value", member))


def _without_empty(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    parts = {key: _without_empty(part) for key, part in value.items()}
    return {key: part for key, part in parts.items() if part not in (None, {}, [])}
