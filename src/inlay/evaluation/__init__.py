"""What quantizing changed: outputs and layers compared, and what a reader should know of it."""

__all__: list[str] = []
