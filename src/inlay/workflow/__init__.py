"""Workflows from a model and data to a folder: calibrate, resume, requantize, save."""

__all__: list[str] = []
