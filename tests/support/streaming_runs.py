"""Runs from disk to disk and in memory, to be held against each other."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from families import batch

from inlay import Recipe, calibrate, stream
from inlay.checkpoint.loading import load_model
from inlay.checkpoint.stored_model import StoredModel
from inlay.engine.streamed.journal import Journal


def batches(count: int = 6, lengths: tuple[int, ...] = (6,)) -> list[dict[str, Any]]:
    """Batches of which every other one has padding."""
    found = []
    for index in range(count):
        made = batch(torch.nn.Module(), index, tokens=lengths[index % len(lengths)])
        made["attention_mask"][0, :2] = index % 2
        found.append(made)
    return found


def in_memory(folder: Path, recipe: Recipe, data: list[Any] | None, **options: Any) -> Path:
    """Calibrate a model in memory; return the folder that was written, beside that of the model."""
    torch._dynamo.reset()
    out = folder.parent / "in-memory"
    calibrate(load_model(folder), recipe, data, **{"compiler": "eager", **options}).save(out)
    return out


def streamed(
    model: Path | StoredModel, recipe: Recipe, data: list[Any] | None, **options: Any
) -> Path:
    """The same from disk to disk.

    :param options: of `stream`, and `name`, that of the folder
    """
    torch._dynamo.reset()
    folder = model if isinstance(model, Path) else Path(model.source.place)
    out = folder.parent / options.pop("name", "streamed")
    return stream(model, recipe, data, out=out, **{"compiler": "eager", **options}).folder


@contextmanager
def stopping(*, after: int) -> Iterator[None]:
    """Stop a streamed run when so many regions are in the journal."""
    add = Journal.add

    def add_some(self: Journal, written: Any) -> None:
        if len(self.written) == after:
            raise KeyboardInterrupt
        add(self, written)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Journal, "add", add_some)
        with pytest.raises(KeyboardInterrupt):
            yield


def recipe_of_killed(equalized: bool) -> Recipe:
    """The recipe of runs that are killed, here and in a process of their own."""
    observer = {"observer": "histogram"} if equalized else {}
    strength = 0.7 if equalized else None
    return Recipe.from_preset("W8A8_STATIC", ignore=["lm_head"], inputs=observer, equalize=strength)
