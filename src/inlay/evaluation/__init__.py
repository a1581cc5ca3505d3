"""Evaluation: comparing outputs and layers before and after, and findings for the reader."""

__all__: list[str] = []
