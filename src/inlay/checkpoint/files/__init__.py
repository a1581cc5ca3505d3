"""Files of a model: tensors by name, and what else its folder holds."""

__all__: list[str] = []
