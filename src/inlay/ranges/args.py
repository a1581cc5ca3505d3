"""Keys that tell whether two `QuantizationArgs` mean the same."""

from compressed_tensors.quantization import QuantizationArgs

__all__ = ["format_key_of", "key_of"]


def key_of(args: QuantizationArgs) -> str:
    """Return all fields as JSON, which can be compared, looked up and read back."""
    return str(args.model_dump_json())


def format_key_of(args: QuantizationArgs) -> str:
    """Return a key of the fields that define the format, without those of the observer."""
    return key_of(args.model_copy(update={"observer": None, "observer_kwargs": {}}))
