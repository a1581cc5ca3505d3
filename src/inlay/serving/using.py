"""Use a loaded model on texts: continue them, or embed them."""

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["continued", "embedded"]


def continued(model: Any, tokenizer: Any, texts: Sequence[str], *, tokens: int) -> list[str]:
    """Return each text with what a language model adds, always choosing the likeliest token."""
    results = []
    for text in texts:  # one by one: padding would have to be left out
        batch = tokenizer(text, return_tensors="pt")
        with torch.no_grad():
            found = model.generate(**batch, max_new_tokens=tokens, do_sample=False)
        results.append(tokenizer.decode(found[0], skip_special_tokens=True))
    return results


def embedded(model: Any, tokenizer: Any, texts: Sequence[str]) -> torch.Tensor:
    """Return a vector for each text: the mean of its tokens, of length one."""
    batch = tokenizer(list(texts), padding=True, truncation=True, return_tensors="pt")
    with torch.no_grad():
        hidden = model(**batch).last_hidden_state.float()
    weights = batch["attention_mask"].unsqueeze(-1).float()
    return torch.nn.functional.normalize((hidden * weights).sum(1) / weights.sum(1))
