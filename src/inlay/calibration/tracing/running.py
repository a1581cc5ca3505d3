"""Choose tracing strategies for a model."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from inlay.calibration.backend import Backend
from inlay.calibration.tracing.blocks import Blocks, block_modules
from inlay.calibration.tracing.strategies import (
    BranchesError,
    Enclosed,
    Strategies,
    Strategy,
    is_of_library,
    left_alone,
    watched_while_traced,
)
from inlay.errors import ConfigurationError
from inlay.memory import collecting_garbage_later, keeping_freed_memory
from inlay.recipe import Plan
from inlay.torch_private import branch_errors, has_hooks, observing_dynamo

__all__ = ["evaluating", "run_apart", "run_for_statistics", "running"]

_LOGITS = "logits_to_keep"  # argument of language models of transformers: for how many tokens


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put all modules of a model in evaluation mode, then restore the mode of each.

    This sets the flags alone. A model's own `train` and `eval` may do more, such as merging the
    weights of adapters, which restoring the flags would not undo.
    """
    training = [module for module in model.modules() if module.training]
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def running() -> Iterator[None]:
    """Run the graphs of a calibration: without gradients, and without detours of Dynamo."""
    with (
        torch.no_grad(),
        _without_autocast_cache(),
        observing_dynamo(),
        keeping_freed_memory(),
        collecting_garbage_later(),
    ):
        yield


@contextmanager
def _without_autocast_cache() -> Iterator[None]:
    """Have `torch.autocast` cast weights anew for each use.

    It keeps what it cast by the identity of the weight, and would give real tensors to a trace.
    """
    is_enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(is_enabled)


_EAGER = "one graph for all blocks, eager around them"
_AROUND = "one graph for all blocks, one graph around them"
_WHOLE = "one graph of the whole model"
_BROKEN = "several graphs of the model, with graph breaks between them"


def run_for_statistics(model: nn.Module, pruning: Backend, keeping: Backend) -> Strategies:
    """Run a model by the fastest tracing strategy that can trace it.

    :param pruning: makes graphs that drop the outputs of the model
    :param keeping: makes graphs that keep them, for a model that is traced in several
    """
    # Outputs can be dropped only if nothing but the caller sees them: in a single graph.
    whole = torch.compile(Enclosed(model), backend=pruning, fullgraph=True)
    broken = torch.compile(Enclosed(model), backend=keeping)
    in_one = watched_while_traced(whole, model, pruning)
    return Strategies(
        pruning.store,
        [
            *_with_blocks_apart(model, pruning),
            Strategy(_WHOLE, _on_model(model, in_one)),
            Strategy(_BROKEN, _on_model(model, broken)),
        ],
    )


def _with_blocks_apart(model: nn.Module, backend: Backend) -> Iterator[Strategy]:
    plan = backend.store.bindings.statistics.plan
    around = _observes_around(model, plan)
    blocks = Blocks(model, backend, None if around else plan)
    if not blocks:
        return
    if blocks.end_in_observing(plan) and not around:
        run = blocks.eager_around(_with_few_logits(model, blocks.root, backend))
        yield Strategy(_EAGER, blocks.refreshed(run))
    else:
        run = watched_while_traced(blocks.traced_around(), blocks.root, backend)
        yield Strategy(_AROUND, blocks.refreshed(run))


def _on_model(model: nn.Module, run: Callable[..., Any]) -> Callable[..., Any]:
    """Return `run` on the user's model, which evaluates meanwhile.

    :raises BranchesError: in place of Dynamo's own error, if code branches on values of tensors
    """

    def on_model(*args: Any, **kwargs: Any) -> Any:
        try:
            with evaluating(model):
                return run(*args, **kwargs)
        except branch_errors() as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            places = [line for line in lines if line.startswith("File ")]
            where = f" at {places[-1].removeprefix('File ')}" if places else ""
            raise BranchesError(
                f"{type(model).__name__} cannot be traced: it branches on values of tensors{where} "
                f"({lines[0]}). Dynamo would run what follows without observers; change the model "
                "so that it does not branch there"
            ) from error

    return on_model


def _observes_around(model: nn.Module, plan: Plan) -> bool:
    """Return whether anything around the blocks is quantized, or uses of weights are needed."""
    inside = _inside_blocks(model)
    return plan.recipe.equalize is not None or not all(
        inside(slot.module) for slot in plan.slots.values()
    )


def _inside_blocks(model: nn.Module) -> Callable[[str], bool]:
    blocks = block_modules(model)

    def is_inside(name: str) -> bool:
        return name in blocks or ("." in name and is_inside(name.rpartition(".")[0]))

    return is_inside


def _is_known(module: nn.Module) -> bool:
    """Whether a call of a module runs what a library has written, and nothing else."""
    return is_of_library(module) and not has_hooks(module) and "forward" not in vars(module)


def _with_few_logits(
    model: nn.Module, copy: Callable[..., Any], backend: Backend
) -> Callable[..., Any]:
    """Run the head of a model for one token alone, unless the outputs or a loss are wanted.

    Only if a library has written all that runs around the blocks: nothing else sees the logits.
    """
    inside = _inside_blocks(model)
    around = (module for name, module in model.named_modules() if not inside(name))
    takes_few = _LOGITS in inspect.signature(model.forward).parameters
    if not takes_few or not all(map(_is_known, around)):
        return copy

    def run(*args: Any, **kwargs: Any) -> Any:
        are_wanted = backend.keeps_outputs or kwargs.get("labels") is not None
        return copy(*args, **(kwargs if are_wanted else {_LOGITS: 1, **kwargs}))

    return run


def run_apart(model: nn.Module, backend: Backend) -> Strategies:
    """Run a model with its blocks as nodes of the graph around them, and in no other way.

    :raises ConfigurationError: if the model has no blocks
    """
    blocks = Blocks(model, backend)
    if not blocks:
        raise ConfigurationError(
            f"{type(model).__name__} cannot be streamed, because it has no blocks: no two modules "
            "of one class stand in a row; calibrate it in memory"
        )
    run = blocks.traced_around()

    def leaving_the_model_alone(*args: Any, **kwargs: Any) -> Any:
        with left_alone(blocks.root):
            return run(*args, **kwargs)

    refreshed = blocks.refreshed(leaving_the_model_alone)
    return Strategies(backend.store, [Strategy(_AROUND, refreshed)])
