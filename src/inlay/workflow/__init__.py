"""From a model and data to a folder: calibrate, resume, save."""

__all__: list[str] = []
