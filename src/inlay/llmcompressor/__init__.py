"""Calibrate by Inlay inside llm-compressor: `oneshot(..., pipeline="inlay")`.

Importing this module registers the pipeline, and Inlay's observers that llm-compressor lacks.
"""

from importlib.util import find_spec

if find_spec("llmcompressor") is None:
    raise ImportError(
        "inlay.llmcompressor works inside llm-compressor, which is not installed; install it with "
        "`pip install 'inlay[llmcompressor]'`"
    )

from inlay.llmcompressor.observers import offer_observers
from inlay.llmcompressor.pipeline import InlayPipeline, register_pipeline

__all__ = ["InlayPipeline", "register_pipeline"]

register_pipeline("inlay")
offer_observers()
