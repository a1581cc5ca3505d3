"""What is known of number formats: their grids, how they are stored, and who serves them."""

__all__: list[str] = []
