"""Where batches come from: files, texts, datasets and loaders, tokenized where they are text."""

__all__: list[str] = []
