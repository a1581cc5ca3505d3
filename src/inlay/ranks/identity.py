"""Which process of a group this one is. Without a group, it is the first and only one.

It does not import torch: a process that has not imported it is in no group.
"""

import sys
from typing import Any

__all__ = ["is_first", "rank", "size"]


def rank() -> int:
    """The number of this process in its group."""
    group = _group()
    return 0 if group is None else int(group.get_rank())


def size() -> int:
    """How many processes the group has."""
    group = _group()
    return 1 if group is None else int(group.get_world_size())


def is_first() -> bool:
    """Whether this process is the one that writes, prints and draws bars."""
    return rank() == 0


def _group() -> Any:
    """The module of groups, if there is a group."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed
