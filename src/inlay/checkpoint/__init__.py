"""Checkpoints: loading models, and writing folders that transformers and vLLM load."""

__all__: list[str] = []
