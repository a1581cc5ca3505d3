"""Move the size of outlier channels from activations into weights, without changing the model."""

__all__: list[str] = []
