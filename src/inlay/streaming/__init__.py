"""Calibrating a model that does not fit into memory: from disk to disk, block by block."""

from inlay.streaming.stream import stream

__all__ = ["stream"]
