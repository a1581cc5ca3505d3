"""Compensate the rounding error of weights: GPTQ, for many layers of one shape at once."""

__all__: list[str] = []
