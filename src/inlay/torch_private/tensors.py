"""Private parts of torch: tensors without data, and what tensors share."""

import logging
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from inlay.torch_private.changing import changed

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "allow_real_tensors",
    "counting_guards_of_code",
    "fake_mode_of",
    "is_proxied",
    "lost_guards",
    "quiet_about_failures",
    "share_memory",
    "without_fake_mode",
]


def fake_mode_of(*values: Any) -> FakeTensorMode | None:
    """The fake mode of the first fake tensor among the values.

    Dynamo's current mode is another one by the time it calls a backend. torch 2.0; FakeTensor is
    documented for custom backends.
    """
    for value in values:
        if isinstance(value, FakeTensor):
            return value.fake_mode
    return None


def allow_real_tensors(mode: FakeTensorMode | None) -> AbstractContextManager[None]:
    """Let tensors with data take part in tracing: compressed-tensors keeps its ranges in some.

    torch 2.0; else pass these tensors in as inputs of the graph.
    """
    return changed(mode, allow_non_fake_inputs=True)


def without_fake_mode() -> AbstractContextManager[Any]:
    """Compute with real tensors in the middle of tracing.

    torch 2.1; else make the call before tracing starts.
    """
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    context: AbstractContextManager[Any] = unset_fake_temporarily()
    return context


def is_proxied() -> bool:
    """Whether `make_fx` is recording. torch 2.2; else look for proxies among the arguments."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    return get_proxy_mode() is not None


def share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are views of the same memory, also if they have no data.

    torch 2.0; `data_ptr` is public and refuses tensors without data. Tensors under `vmap` and the
    like do not tell, and count as if they did.
    """
    try:
        storages = [tensor.untyped_storage()._cdata for tensor in (one, other)]
    except (NotImplementedError, RuntimeError):
        return True
    return bool(storages[0] == storages[1])


@contextmanager
def quiet_about_failures() -> Iterator[None]:
    """Keep ops without data that fail in this thread from being logged: it is tried if they do.

    torch 2.9; else the log shows them.
    """
    own = threading.get_ident()

    def is_of_others(record: logging.LogRecord) -> bool:
        return record.thread != own

    logger = logging.getLogger("torch._subclasses.fake_tensor")
    logger.addFilter(is_of_others)
    try:
        yield
    finally:
        logger.removeFilter(is_of_others)


def lost_guards(mode: FakeTensorMode | None) -> int:
    """How many conditions on sizes came up after Dynamo had written down those it checks.

    torch 2.1; else compile while Dynamo is tracing.
    """
    shapes = None if mode is None else mode.shape_env
    return 0 if shapes is None else int(shapes.counter["ignored_backward_guard"])


def counting_guards_of_code(mode: FakeTensorMode | None) -> AbstractContextManager[None]:
    """Keep the cache of fake tensors from asking about sizes on its own account.

    torch 2.1; `lost_guards` would count what it asks, though no code depends on the answer.
    """
    return changed(mode, cache_enabled=False)
