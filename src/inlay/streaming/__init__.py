"""Calibrating a model that does not fit into memory: from disk to disk, block by block."""

__all__: list[str] = []
