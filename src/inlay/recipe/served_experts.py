"""How servers run experts, and what they refuse: known before anything is calibrated."""

from collections.abc import Mapping, Sequence

from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationScheme,
    QuantizationStrategy,
)
from compressed_tensors.quantization.quant_args import QuantizationType
from compressed_tensors.utils.match import is_match, match_targets
from torch import nn

from inlay.errors import ConfigurationError

__all__ = ["scheme_of_experts"]


def scheme_of_experts(
    experts: str,
    members: Mapping[str, nn.Module],
    schemes: Mapping[str, QuantizationScheme],
    ignored: Sequence[str],
) -> QuantizationScheme | str:
    """Find the scheme of all experts of a module, or why they stay as they are.

    :param experts: the name of the module
    :param members: the Linear modules of its experts, by name
    :param schemes: the schemes of a recipe, by target
    :raises ConfigurationError: if a server would refuse what the recipe asks for
    """
    found = {name: _matched(name, module, schemes, ignored) for name, module in members.items()}
    first = next(iter(found))
    keys = {id(scheme): _key_of(scheme) for scheme in found.values()}
    unlike = [name for name in found if keys[id(found[name])] != keys[id(found[first])]]
    if unlike:
        raise ConfigurationError(
            f"the recipe quantizes {unlike[0]} unlike {first}; a server runs all experts of "
            f"{experts} as one, so target or ignore all of them"
        )
    scheme = found[first]
    if scheme is None:
        return "the recipe does not target them"
    if scheme.weights is None:
        return "the recipe does not quantize their weights"
    if scheme.output_activations is not None:
        return "the recipe quantizes their outputs, for which experts have no scales"
    problem = _problem(scheme.weights, scheme.input_activations)
    if problem is not None:
        raise ConfigurationError(
            f"vLLM does not run the experts of {experts} with {problem}, or leave experts in full "
            'precision with ignore=["re:.*[.]experts[.].*"]'
        )
    return scheme


def _problem(weights: QuantizationArgs, inputs: QuantizationArgs | None) -> str | None:
    """Say what a server refuses of a scheme for experts, and what to use; None if nothing."""
    if inputs is None:
        return None
    strategies = weights.strategy, inputs.strategy
    if _is(weights, QuantizationType.INT, 8) and _is(inputs, QuantizationType.INT, 8):
        if inputs.dynamic is not True:
            return "static INT8 inputs: use W8A8, with scales per token"
        if strategies != (QuantizationStrategy.CHANNEL, QuantizationStrategy.TOKEN):
            return (
                f"INT8 weights per {_name(weights)} and inputs per {_name(inputs)}: use W8A8, with "
                "weights per channel and inputs per token"
            )
    if _is(weights, QuantizationType.FLOAT, 8) and _is(inputs, QuantizationType.FLOAT, 8):
        is_block = weights.strategy == QuantizationStrategy.BLOCK
        if not is_block and strategies not in _FP8:
            return (
                f"FP8 weights per {_name(weights)} and inputs per {_name(inputs)}: use FP8 (both "
                "per tensor), FP8_DYNAMIC (per channel and per token) or FP8_BLOCK"
            )
    return None


_FP8 = {
    (QuantizationStrategy.TENSOR, QuantizationStrategy.TENSOR),
    (QuantizationStrategy.CHANNEL, QuantizationStrategy.TOKEN),
}


def _is(args: QuantizationArgs, kind: QuantizationType, bits: int) -> bool:
    return bool(args.type == kind and args.num_bits == bits)


def _name(args: QuantizationArgs) -> str:
    return str(getattr(args.strategy, "value", args.strategy))


def _matched(
    name: str,
    module: nn.Module,
    schemes: Mapping[str, QuantizationScheme],
    ignored: Sequence[str],
) -> QuantizationScheme | None:
    matched = match_targets(name, module, schemes)
    return schemes[matched[0]] if matched and not is_match(name, module, ignored) else None


def _key_of(scheme: QuantizationScheme | None) -> str:
    """A text that is the same for schemes that quantize alike, whatever they target."""
    return "" if scheme is None else str(scheme.model_dump_json(exclude={"targets"}))
