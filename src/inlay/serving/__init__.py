"""Run quantized checkpoints on kernels that read their weights as they are stored."""

from inlay.serving.loading import load
from inlay.serving.packaging import package

__all__ = ["load", "package"]
