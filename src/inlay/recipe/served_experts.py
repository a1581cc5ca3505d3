"""Find the one scheme that servers need for all experts of a module, before calibrating."""

from collections.abc import Mapping, Sequence

from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.utils.match import is_match, match_targets
from torch import nn

from inlay.errors import ConfigurationError
from inlay.formats.serving import expert_problem

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
    problem = expert_problem(scheme.weights, scheme.input_activations)
    if problem is not None:
        raise ConfigurationError(
            f"vLLM does not run the experts of {experts} with {problem}, or leave experts in full "
            'precision with ignore=["re:.*[.]experts[.].*"]'
        )
    return scheme


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
