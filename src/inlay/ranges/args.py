"""When two `QuantizationArgs` mean the same."""

from compressed_tensors.quantization import QuantizationArgs

__all__ = ["format_key_of", "key_of"]


def key_of(args: QuantizationArgs) -> str:
    """All fields, in a form that can be compared, looked up and read back."""
    return str(args.model_dump_json())


def format_key_of(args: QuantizationArgs) -> str:
    """The fields that say what a value is quantized to, without those of its observer."""
    return key_of(args.model_copy(update={"observer": None, "observer_kwargs": {}}))
