"""What passes put into graphs: nodes that observe, quantize and compare."""

__all__: list[str] = []
