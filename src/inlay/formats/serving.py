"""Which formats vLLM serves, and in which combinations."""

from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy

from inlay.formats.numbers import name_of

__all__ = ["expert_problem"]

_FP8 = {
    (QuantizationStrategy.TENSOR, QuantizationStrategy.TENSOR),
    (QuantizationStrategy.CHANNEL, QuantizationStrategy.TOKEN),
}


def expert_problem(weights: QuantizationArgs, inputs: QuantizationArgs | None) -> str | None:
    """Describe why vLLM does not run experts in these formats, and what to use instead.

    Return None if it does.
    """
    if inputs is None:
        return None
    formats = name_of(weights), name_of(inputs)
    strategies = weights.strategy, inputs.strategy
    if formats == ("int8", "int8"):
        if inputs.dynamic is not True:
            return "static INT8 inputs: use W8A8, with scales per token"
        if strategies != (QuantizationStrategy.CHANNEL, QuantizationStrategy.TOKEN):
            return (
                f"INT8 weights per {_name(weights)} and inputs per {_name(inputs)}: use W8A8, with "
                "weights per channel and inputs per token"
            )
    if formats == ("float8", "float8"):
        is_block = weights.strategy == QuantizationStrategy.BLOCK
        if not is_block and strategies not in _FP8:
            return (
                f"FP8 weights per {_name(weights)} and inputs per {_name(inputs)}: use FP8 (both "
                "per tensor), FP8_DYNAMIC (per channel and per token) or FP8_BLOCK"
            )
    return None


def _name(args: QuantizationArgs) -> str:
    return str(getattr(args.strategy, "value", args.strategy))
