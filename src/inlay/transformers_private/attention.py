"""Private parts of transformers: the attention function that a model calls."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["eager_attention"]


@contextmanager
def eager_attention(model: Any, around: Callable[..., Any]) -> Iterator[None]:
    """Let the eager attention of all models run through `around` for a while.

    transformers 4.48; the table is public as `AttentionInterface`, its entry "eager" is not: as a
    rule there is none, and a model calls the function of its own file. Without it, a script of
    llm-compressor that quantizes keys or values would be run by llm-compressor itself.

    :param around: called with the eager function of the module's class and its arguments
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    classes = {type(module) for module in model.modules()}
    functions = {cls: own for cls in classes if (own := _eager_function(cls)) is not None}
    before = ALL_ATTENTION_FUNCTIONS.get("eager")

    def attend(module: Any, *args: Any, **kwargs: Any) -> Any:
        return around(before or functions[type(module)], module, *args, **kwargs)

    ALL_ATTENTION_FUNCTIONS["eager"] = attend
    try:
        yield
    finally:
        if before is None:
            del ALL_ATTENTION_FUNCTIONS["eager"]
        else:
            ALL_ATTENTION_FUNCTIONS["eager"] = before


def _eager_function(cls: type) -> Callable[..., Any] | None:
    """Return eager attention as the file of a class defines it, or that of one of its bases."""
    files = (sys.modules.get(base.__module__) for base in cls.__mro__)
    found = (getattr(file, "eager_attention_forward", None) for file in files)
    return next((function for function in found if function is not None), None)
