"""Look up presets, which are schemes by name, apply changes to them, and choose their method."""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any, Literal

import pydantic
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    QuantizationStrategy,
    QuantizationType,
    is_preset_scheme,
    preset_name_to_scheme,
)
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES

from inlay.compensation.settings import GPTQ
from inlay.errors import ConfigurationError

__all__ = [
    "METHODS",
    "Method",
    "Overrides",
    "change",
    "checked",
    "has_static_inputs",
    "names_of",
    "preset",
    "preset_names",
    "with_best_rounding",
]

# compressed-tensors has no preset for static int8 activations.
_OWN_PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    "W8A8_STATIC": {
        "weights": {"num_bits": 8, "strategy": "channel", "symmetric": True},
        "input_activations": {"num_bits": 8, "strategy": "tensor", "symmetric": False},
    },
}

Method = Literal["best", "plain"]
METHODS: dict[Method, str] = {
    "best": "GPTQ for weights of few bits, and equalized inputs for static integers",
    "plain": "llm-compressor's defaults: observers without search, and rounding to nearest",
}
# Weights of more bits lose next to nothing when they are rounded to nearest.
_FEW_BITS = 4
_WEIGHED = (
    QuantizationStrategy.CHANNEL,
    QuantizationStrategy.GROUP,
    QuantizationStrategy.TENSOR_GROUP,
)

Overrides = Any  # QuantizationArgs, or a mapping of their fields


def preset_names() -> list[str]:
    """List the names that `Recipe.from_preset` takes."""
    return sorted({*PRESET_SCHEMES, *_OWN_PRESETS})


def preset(name: str, targets: list[str]) -> QuantizationScheme:
    if name.upper() in _OWN_PRESETS:
        return QuantizationScheme(targets=targets, **_OWN_PRESETS[name.upper()])
    if not is_preset_scheme(name):
        raise ConfigurationError(
            f"there is no preset {name!r}; use one of {', '.join(preset_names())}"
        )
    return preset_name_to_scheme(name, targets)


def with_best_rounding(
    config: QuantizationConfig, gptq: GPTQ | None, *, has_data: bool
) -> tuple[QuantizationConfig, GPTQ | None]:
    """Choose the best method for weights of few bits whose observer nobody named.

    With data that is GPTQ, with ranges weighted by the importance of input channels. Without data
    it is the range with the smallest error.

    :return: the config and the settings of GPTQ, as they were if there are no such weights
    """
    changed: QuantizationConfig = config.model_copy(deep=True)
    found = False
    for scheme in changed.config_groups.values():
        args: QuantizationArgs | None = scheme.weights
        if args is None or args.observer is not None or args.num_bits > _FEW_BITS:
            continue
        weighs = has_data and args.strategy in _WEIGHED
        observer = "imatrix_mse" if weighs else "memoryless_mse"
        scheme.weights = args.model_copy(update={"observer": observer})
        found = True
    if not found:
        return config, gptq
    return changed, gptq or (GPTQ() if has_data else None)


def has_static_inputs(scheme: QuantizationScheme) -> bool:
    """Whether inputs are quantized to integers with one static scale, by an unnamed observer."""
    args: QuantizationArgs | None = scheme.input_activations
    return (
        args is not None
        and args.observer is None
        and args.dynamic is False
        and args.type == QuantizationType.INT
        and args.strategy == QuantizationStrategy.TENSOR
    )


def change(
    args: QuantizationArgs | None, wanted: Overrides | None, part: str
) -> QuantizationArgs | None:
    if wanted is None:
        return args
    if isinstance(wanted, QuantizationArgs):
        return wanted.model_copy(deep=True)
    if not isinstance(wanted, Mapping):
        raise ConfigurationError(
            f"{part} must be QuantizationArgs or a mapping of their fields, got {wanted!r}"
        )
    fields = {} if args is None else {name: getattr(args, name) for name in _fields(args)}
    # Drop fields that compressed-tensors derives from others, where those change.
    if {"num_bits", "type", "symmetric"} & set(wanted):
        fields.pop("zp_dtype", None)
    if "strategy" in wanted or "group_size" in wanted:
        for name in ("strategy", "group_size", "block_structure"):
            fields.pop(name, None)
        if wanted.get("strategy") in ("group", "tensor_group") and args is not None:
            fields["group_size"] = args.group_size
        if "strategy" not in wanted and args is not None and args.strategy == "tensor_group":
            fields["strategy"] = args.strategy
    return checked(QuantizationArgs, **{**fields, **wanted})


def _fields(args: QuantizationArgs) -> list[str]:
    return list(type(args).model_fields)


def checked(model: type[Any], **fields: Any) -> Any:
    """Build a pydantic model of compressed-tensors, with errors that list its fields."""
    try:
        return model(**fields)
    except (pydantic.ValidationError, NotImplementedError, ValueError, TypeError) as error:
        allowed = ", ".join(sorted(model.model_fields))
        raise ConfigurationError(
            f"{model.__name__}: {_first_problem(error, model.model_fields)}. Its fields are "
            f"{allowed}"
        ) from error


def _first_problem(error: Exception, known: Iterable[str]) -> str:
    if not isinstance(error, pydantic.ValidationError):
        return str(error)
    problem = error.errors()[0]
    name = ".".join(map(str, problem["loc"]))
    if problem["type"] != "extra_forbidden":
        return f"{name}: {problem['msg']}"
    meant = get_close_matches(name, known, n=1)
    return f"there is no field {name}" + (f"; did you mean {meant[0]}?" if meant else "")


def names_of(value: Iterable[str], field: str) -> list[str]:
    names = [value] if isinstance(value, str) else list(value)
    if not all(isinstance(name, str) for name in names):
        raise ConfigurationError(f"{field} must list names of modules, got {names!r}")
    return names
