"""Run the regions of a model that does not fit into memory, one block at a time."""

__all__: list[str] = []
