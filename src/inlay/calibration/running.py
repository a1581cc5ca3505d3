"""How the graphs of a calibration are run: by which way of tracing, in what, and once more."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from inlay.calibration.backend import Backend
from inlay.calibration.bindings import Bindings
from inlay.calibration.blocks import Blocks, block_modules
from inlay.calibration.pipelines import Pipelines
from inlay.calibration.tracing import (
    Enclosed,
    first_that_traces,
    is_of_library,
    left_alone,
    on_trial,
)
from inlay.errors import ConfigurationError, GraphError
from inlay.memory import collecting_garbage_later, keeping_freed_memory
from inlay.recipe import Plan
from inlay.torch_private import branch_errors, compiled_in_place, has_hooks, observing_dynamo

__all__ = ["Rerun", "evaluating", "run_apart", "run_for_statistics", "running"]

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
def running(model: nn.Module) -> Iterator[None]:
    """Run the graphs of a calibration: without gradients, and with the model in evaluation mode."""
    with (
        evaluating(model),
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


def run_for_statistics(model: nn.Module, observing: Backend, parts: Backend) -> Callable[..., Any]:
    """Run a model by the quickest way of tracing that is right for it.

    :param observing: makes graphs that drop the outputs of the model
    :param parts: makes graphs that keep them, for a model that is traced in several
    """
    # Outputs can be dropped only if nothing but the caller sees them: in a single graph.
    whole = torch.compile(Enclosed(model), backend=observing, fullgraph=True)
    broken = torch.compile(Enclosed(model), backend=parts)
    blocks = Blocks(model, observing)
    plan = observing.pipelines.plan
    if blocks.end_in_observing(plan) and _can_stay_around(model, plan):
        apart = blocks.running_around(_with_few_logits(model, observing))
    else:
        apart = blocks.running(whole)
    # Blocks run one after another, so whatever fails may fail late. If the model itself is at
    # fault, tracing it as a whole says so.
    tried = [on_trial(way, model, observing, Exception) for way in apart]
    return _explaining(
        model, first_that_traces([*tried, on_trial(whole, model, observing), broken])
    )


def _explaining(model: nn.Module, run: Callable[..., Any]) -> Callable[..., Any]:
    """Name the model whose code branches on values of tensors, in place of Dynamo's own error."""

    def explained(*args: Any, **kwargs: Any) -> Any:
        try:
            return run(*args, **kwargs)
        except branch_errors() as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            places = [line for line in lines if line.startswith("File ")]
            where = f" at {places[-1].removeprefix('File ')}" if places else ""
            raise GraphError(
                f"{type(model).__name__} cannot be traced: it branches on values of tensors{where} "
                f"({lines[0]}). Dynamo would run what follows without observers; change the model "
                "so that it does not branch there"
            ) from error

    return explained


def _can_stay_around(model: nn.Module, plan: Plan) -> bool:
    """Whether the model around its blocks can run as it is, and need not be traced.

    That is so if nothing of it is quantized, it is known to use its blocks as wholes, nobody else
    sees its logits, and it has no head that would run in vain. Equalization wants to see all uses
    of a weight.
    """
    blocks = block_modules(model)

    def is_inside(name: str) -> bool:
        return name in blocks or ("." in name and is_inside(name.rpartition(".")[0]))

    around = [module for name, module in model.named_modules() if not is_inside(name)]
    return (
        plan.recipe.equalize is None
        and all(map(is_inside, {slot.module for slot in plan.slots.values()}))
        and all(map(_is_known, around))
        and not any(map(compiled_in_place, model.modules()))
        and (_takes_few_logits(model) or not _has_head(model))
    )


def _is_known(module: nn.Module) -> bool:
    """Whether a call of a module runs what a library has written, and nothing else."""
    return is_of_library(module) and not has_hooks(module) and "forward" not in vars(module)


def _with_few_logits(model: nn.Module, observing: Backend) -> Callable[..., Any]:
    """The model with its head run for one token alone, unless the outputs or a loss are wanted."""
    if not _takes_few_logits(model):
        return model

    def run(*args: Any, **kwargs: Any) -> Any:
        are_wanted = observing.pipelines.outputs or kwargs.get("labels") is not None
        return model(*args, **(kwargs if are_wanted else {_LOGITS: 1, **kwargs}))

    return run


def _takes_few_logits(model: nn.Module) -> bool:
    return _LOGITS in inspect.signature(model.forward).parameters


def _has_head(model: nn.Module) -> bool:
    """Whether a model of transformers computes a number for each word of its vocabulary."""
    find = getattr(model, "get_output_embeddings", None)
    return find is not None and find() is not None


def run_apart(model: nn.Module, observing: Backend) -> Callable[..., Any]:
    """Run a model with its blocks as graphs of their own, and in no other way.

    :raises ConfigurationError: if the model has no blocks
    """
    whole = torch.compile(Enclosed(model), backend=observing, fullgraph=True)
    apart = Blocks(model, observing).running(whole)
    if not apart:
        raise ConfigurationError(
            f"{type(model).__name__} cannot be streamed, because it has no blocks: no two modules "
            "of one class stand in a row; calibrate it in memory"
        )
    (run,) = apart

    def leaving_the_model_alone(*args: Any, **kwargs: Any) -> Any:
        with left_alone(model):
            return run(*args, **kwargs)

    return leaving_the_model_alone


@dataclass(frozen=True, kw_only=True)
class Rerun:
    """The model as it was traced for its statistics, run op by op for what it returns.

    Nothing is traced again for batches of the sizes that were observed.

    :param run: runs a batch through the graphs of the backends
    :param bindings: qparams, folded weights, and sums of the errors of layers
    """

    run: Callable[[Any], Any]
    backends: Sequence[Backend]
    bindings: Bindings
    pipelines: Pipelines

    def plain(self, batch: Any) -> Any:
        """The outputs of the plain model, from the graphs that observed it."""
        return self._outputs(batch, replace(self.pipelines, plain=True))

    def quantized(self, batch: Any) -> Any:
        """The outputs of the quantized model."""
        return self._outputs(batch, self.pipelines)

    def comparing_layers(self, batch: Any) -> Any:
        """The outputs of the plain model, while its layers are compared with quantized ones."""
        return self._outputs(batch, self._comparing)

    @contextmanager
    def running(self, *, quantized: bool = False, compare_layers: bool = False) -> Iterator[None]:
        """Have the graphs that run meanwhile give the outputs of one model or the other.

        :param quantized: those of the quantized model
        :param compare_layers: compare the layers of the plain model on the way
        """
        plain = not (quantized or compare_layers)
        pipelines = replace(self.pipelines, plain=plain, compare_layers=compare_layers)
        with self._lent(pipelines):
            yield

    def let_go_of_blocks(self) -> None:
        """Drop folded and equalized weights of blocks; they are made again when needed."""
        for backend in self.backends:
            for graph in backend.graphs:
                if graph.is_region:
                    graph.unbind()
        self.bindings.weights.forget_folded()
        self.bindings.weights.equalized.forget_copies()

    def forget(self) -> None:
        """Drop the graphs that were made for this, and what they hold."""
        plain = replace(self.pipelines, plain=True)
        for backend in self.backends:
            for pipelines in (self.pipelines, self._comparing, plain):
                backend.forget(pipelines)

    @property
    def _comparing(self) -> Pipelines:
        return replace(self.pipelines, compare_layers=True)

    @contextmanager
    def _lent(self, pipelines: Pipelines) -> Iterator[None]:
        with ExitStack() as stack:
            for backend in self.backends:
                stack.enter_context(backend.lent(self.bindings, pipelines))
            yield

    def _outputs(self, batch: Any, pipelines: Pipelines) -> Any:
        with self._lent(pipelines):
            outputs = self.run(batch)
        # If Dynamo is turned off the plain model runs, and nothing would seem to have changed.
        if not any(backend.serves(pipelines) for backend in self.backends):
            raise GraphError(
                "cannot run the quantized model because torch.compile is turned off; unset "
                "TORCHDYNAMO_DISABLE and leave torch.compiler's stance alone"
            )
        return outputs
