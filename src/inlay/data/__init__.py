"""Batches from files, texts, datasets and loaders, tokenized if they are text."""

__all__: list[str] = []
