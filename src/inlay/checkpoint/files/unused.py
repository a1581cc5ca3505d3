"""Warn of tensors in a model's files that a checkpoint of the loaded model will not hold."""

import re
import warnings
from collections.abc import Iterable
from typing import Any

from inlay.run_record import model_name
from inlay.transformers_private import Loading

__all__ = ["warn_of_unused"]

_NAMED = 3
# Constants that older versions of transformers stored, and that models compute now.
_COMPUTED = re.compile(r"(^|\.)(rotary_emb\.inv_freq|attn\.(masked_)?bias|position_ids)$")


def warn_of_unused(model: Any, stored: Iterable[str], loading: Loading) -> None:
    """Warn of stored tensors that loading leaves out, and so a checkpoint will.

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
