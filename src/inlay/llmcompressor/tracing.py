"""A model as llm-compressor prepared it, made traceable for a while, and then put back."""

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from types import CodeType
from typing import Any

import torch
import torch.nn.functional as F
from compressed_tensors.offload.cache import OffloadCache
from compressed_tensors.quantization.lifecycle.forward import set_forward_quantized
from llmcompressor.utils.helpers import (
    DisableQuantization,
    disable_cache,
    disable_hf_kernels,
    eval_context,
    use_eager_attention,
)
from torch import nn
from torch.utils.hooks import RemovableHandle

from inlay.torch_private import observing_dynamo
from inlay.transformers_private import eager_attention

__all__ = ["is_in_place", "traceable"]


@contextmanager
def traceable(
    model: nn.Module, hooks: Collection[RemovableHandle], *, states: bool
) -> Iterator[None]:
    """Run a model as in llm-compressor's calibration, without what breaks its graph.

    Taken off for as long as this lasts are the given hooks, and forwards that quantize or move
    weights. Numbers are those of llm-compressor's pipelines: eager attention, no cache, no
    training, no quantization.

    :param states: whether queries, keys and values are observed
    """
    attention = _marked_attention if states else use_eager_attention
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(observing_dynamo())  # a script may quantize many models
        for context in (disable_cache, eval_context, disable_hf_kernels, DisableQuantization):
            stack.enter_context(context(model))
        stack.enter_context(_without_new_attributes(model))
        stack.enter_context(_without_hooks(model, {hook.id for hook in hooks}))
        stack.enter_context(_with_own_forwards(model))
        stack.enter_context(_with_plain_weights(model))
        stack.enter_context(attention(model))
        yield


@contextmanager
def _without_new_attributes(model: nn.Module) -> Iterator[None]:
    """Take off what `torch.compile` notes on the module that it compiles."""
    before = set(vars(model))
    try:
        yield
    finally:
        for name in set(vars(model)) - before:
            delattr(model, name)


@contextmanager
def _without_hooks(model: nn.Module, ids: Collection[int]) -> Iterator[None]:
    """Take off hooks by their ids."""
    before = []
    try:
        for module in model.modules():
            for hooks in (module._forward_pre_hooks, module._forward_hooks):
                before.append((hooks, dict(hooks)))
                for number in before[-1][1]:
                    if number in ids:
                        del hooks[number]
        yield
    finally:
        for hooks, were in before:  # in the order in which they were
            hooks.clear()
            hooks.update(were)


@contextmanager
def _with_own_forwards(model: nn.Module) -> Iterator[None]:
    """Let modules run the forward that they had before it was wrapped to quantize or to onload."""
    wrapped = [m for m in model.modules() if _unwrapped(m) is not None]
    forwards = [module.forward for module in wrapped]
    try:
        for module in wrapped:
            own = _unwrapped(module)
            del module.forward
            if own is not None and own is not type(module).forward:
                module.forward = own.__get__(module)
        yield
    finally:
        for module, forward in zip(wrapped, forwards, strict=True):
            module.forward = forward


def _unwrapped(module: nn.Module) -> Any:
    """The function below the wrappers of compressed-tensors; None if there are none."""
    outer = getattr(vars(module).get("forward"), "__func__", None)
    function = vars(module).get("_original_forward_func", outer)
    # The wrapper that quantizes takes the name of what it wraps; its code tells it from others.
    if getattr(function, "__code__", None) is _QUANTIZING:
        return type(module).forward
    return None if function is outer else function


(_QUANTIZING,) = (c for c in set_forward_quantized.__code__.co_consts if isinstance(c, CodeType))


@contextmanager
def _with_plain_weights(model: nn.Module) -> Iterator[None]:
    """Hold weights in dictionaries of their own, where they are in a cache that onloads them."""
    cached = [
        (module, name, vars(module)[name])
        for module in model.modules()
        for name in ("_parameters", "_buffers")
        if isinstance(vars(module)[name], OffloadCache)
    ]
    try:
        for module, name, cache in cached:
            setattr(module, name, dict(cache.items()))
        yield
    finally:
        for module, name, cache in cached:
            setattr(module, name, cache)


def is_in_place(model: nn.Module) -> bool:
    """Whether all weights are where they are used, even if they are in a cache."""
    caches = (vars(m)[n] for m in model.modules() for n in ("_parameters", "_buffers"))
    return all(
        _same_device(cache.onload_device, cache.offload_device)
        for cache in caches
        if isinstance(cache, OffloadCache)
    )


def _same_device(one: Any, other: Any) -> bool:
    if "disk" in (one, other):
        return False
    first, second = torch.device(one), torch.device(other)
    return first.type == second.type and (first.index or 0) == (second.index or 0)


@contextmanager
def _marked_attention(model: nn.Module) -> Iterator[None]:
    """Eager attention that also names its queries, keys and values to Inlay.

    Inlay knows them as what the one op of attention takes. Eager attention has no such op, and any
    other attention rounds its results in another way than llm-compressor's pipelines do.
    """

    def attend(
        eager: Callable[..., Any],
        module: nn.Module,
        query: Any,
        key: Any,
        value: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        # Nothing reads the result, so Inlay computes none.
        F.scaled_dot_product_attention(query, key, value, enable_gqa=True)
        return eager(module, query, key, value, *args, **kwargs)

    with eager_attention(model, attend), use_eager_attention(model):
        yield
