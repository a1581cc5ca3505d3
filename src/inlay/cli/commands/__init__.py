"""The commands: quantize a model, inspect a plan or a result, verify it, run it."""

__all__: list[str] = []
