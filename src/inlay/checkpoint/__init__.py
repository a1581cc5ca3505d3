"""Models in and out: loading, the gate, and checkpoints that transformers and vLLM load."""

__all__: list[str] = []
