"""Padding of batches: which tokens are valid, and where the values of a model have them."""

__all__: list[str] = []
