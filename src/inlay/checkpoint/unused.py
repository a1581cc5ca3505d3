"""Warn of what a model's folder holds and a checkpoint of the loaded model will not."""

import json
import re
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from inlay.run_record import model_name
from inlay.transformers_private import Loading

__all__ = ["warn_of_unused"]

_NAMED = 3
# Constants that older versions of transformers stored, and that models compute now.
_COMPUTED = re.compile(r"(^|\.)(rotary_emb\.inv_freq|attn\.(masked_)?bias|position_ids)$")
_OF_SENTENCE_TRANSFORMERS = ("config_sentence_transformers.json", "sentence_bert_config.json")


def warn_of_unused(model: Any, folder: Path, stored: Iterable[str], loading: Loading) -> None:
    """Warn of stored tensors and files that loading leaves out, and so a checkpoint will.

    :param stored: names of the tensors in the files
    :param loading: the conversion from stored names
    """
    names = sorted(stored)
    used = {name for own in loading.sources(model, names).values() for name in own}
    unused = [name for name in names if name not in used and not _COMPUTED.search(name)]
    if unused:
        more = f" and {len(unused) - _NAMED} more" if len(unused) > _NAMED else ""
        warnings.warn(
            f"{type(model).__name__} does not use {len(unused)} of {len(names)} tensors of "
            f"{model_name(model)}: {', '.join(unused[:_NAMED])}{more}. They are left out of a "
            "checkpoint",
            stacklevel=3,
        )
    files = _files_of_sentence_transformers(folder)
    if files:
        warnings.warn(
            f"{model_name(model)} is a model of sentence-transformers, and only its transformer is "
            f"quantized and written. Copy {', '.join(files)} into the checkpoint",
            stacklevel=3,
        )


def _files_of_sentence_transformers(folder: Path) -> list[str]:
    """Return the files of its own in a folder of sentence-transformers."""
    try:
        modules = json.loads((folder / "modules.json").read_text(encoding="utf-8"))
        paths = [str(module["path"]) for module in modules]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    others = [name for name in _OF_SENTENCE_TRANSFORMERS if (folder / name).exists()]
    return ["modules.json", *(f"{path}/" for path in paths if path), *others]
