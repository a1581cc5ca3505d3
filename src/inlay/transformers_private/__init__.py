"""Private parts of transformers. Nothing else in Inlay touches them.

Each entry says what it is for, since which release of transformers it works as used here, and what
to do when it goes. transformers and torch take seconds to import, so functions import them when
called.
"""

from inlay.transformers_private.attention import eager_attention
from inlay.transformers_private.gguf import correct_tokenizer
from inlay.transformers_private.loading import Loading, Mismatch, model_without_data
from inlay.transformers_private.messages import asks_for_trust, gist
from inlay.transformers_private.names import GROUPED_PRODUCT, left_out_of_saving, tied_names
from inlay.transformers_private.saving import (
    as_saved,
    copy_remote_code,
    read_as_linear,
    saved_name,
    without_ties,
)

__all__ = [
    "GROUPED_PRODUCT",
    "Loading",
    "Mismatch",
    "as_saved",
    "asks_for_trust",
    "copy_remote_code",
    "correct_tokenizer",
    "eager_attention",
    "gist",
    "left_out_of_saving",
    "model_without_data",
    "read_as_linear",
    "saved_name",
    "tied_names",
    "without_ties",
]
