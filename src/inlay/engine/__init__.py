"""The engine: calibrate a model in memory or from disk, resume, requantize, save."""

__all__: list[str] = []
