"""Find the one scheme that servers need for all experts of a module, before calibrating."""

import warnings
from collections.abc import Collection, Mapping, Sequence

from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.utils.match import is_match, match_targets
from torch import nn

from inlay.errors import ConfigurationError, StatisticsError
from inlay.formats.serving import expert_problem
from inlay.formats.storage import storage_of

__all__ = ["require_all_or_none", "scheme_of_stacks", "warn_of_plain_stacks"]

_NAMED = 8  # how many experts an error names


def scheme_of_stacks(
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


def require_all_or_none(experts: str, members: Sequence[str], without: Collection[str]) -> bool:
    """Tell whether the experts of a module are quantized.

    :param members: the names of their Linear modules
    :param without: those of them that stay in full precision
    :raises StatisticsError: if only some do
    """
    if without and len(without) < len(members):
        named = ", ".join(list(without)[:_NAMED])
        more = f" and {len(without) - _NAMED} more" if len(without) > _NAMED else ""
        raise StatisticsError(
            f"{named}{more} would stay in full precision, and no server loads experts of which "
            f"only some are quantized; ignore all experts of {experts}"
        )
    return not without


def warn_of_plain_stacks(left: Mapping[str, str], formats: Collection[str | None]) -> None:
    """Warn of experts in full precision that transformers would not load.

    It expects all experts of a compressed checkpoint to be quantized, and accepts experts without
    scales only in FP8 checkpoints.

    :param left: modules whose experts stay in full precision, with the reasons
    :param formats: those of the checkpoint
    """
    if left and not all(storage_of(each).plain_stacks for each in formats):
        first = next(iter(left))
        warnings.warn(
            f"{first} and {len(left) - 1} more stay in full precision: {left[first]}. transformers "
            "expects quantized experts in such a checkpoint and would start with random ones",
            stacklevel=3,
        )


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
