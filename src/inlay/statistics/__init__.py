"""What slots have seen: one value per slot, merged over batches, ranks and runs, on disk too."""

__all__: list[str] = []
