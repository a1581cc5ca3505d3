"""The pipelines of a calibration, one for each phase."""

from collections.abc import Mapping, Sequence

from inlay.equalization.parameters import EqualizedParameters
from inlay.graph import Pass, Pipeline
from inlay.observers import QParamsDict
from inlay.padding.layouts import Layouts
from inlay.passes import (
    PREPARE,
    Annotate,
    CompareLayers,
    FoldQParams,
    InlineCalls,
    LeaveOutPadding,
    LowerToKernels,
    PruneUnobserved,
    RemoveObservers,
    SpeedUpProducts,
    UseEqualized,
)
from inlay.products import onednn_is_faster
from inlay.recipe import Plan

__all__ = ["comparing", "observing", "observing_equalized", "quantizing", "rerunning"]


def observing(
    plan: Plan,
    *,
    passes: Sequence[type[Pass] | Pass] = PREPARE,
    layouts: Layouts | None = None,
    outputs: bool = True,
) -> Pipeline:
    """From a traced graph to one that observes.

    :param passes: see `Calibration`
    :param layouts: where values have the tokens of a batch with padding; None without padding
    :param outputs: whether to keep the outputs of the model
    """
    experts = plan.recipe.experts
    inserting = Pipeline.of(passes, plan=plan, experts=experts, layouts=layouts)
    return Pipeline((*inserting.passes, *_pruning(outputs)))


def observing_equalized(
    plan: Plan,
    equalized: EqualizedParameters,
    *,
    passes: Sequence[type[Pass] | Pass] = PREPARE,
    layouts: Layouts | None = None,
    outputs: bool = True,
) -> Pipeline:
    """The same for the second run over the data, through equalized parameters."""
    experts = plan.recipe.experts
    inserting = Pipeline.of(passes, plan=plan, experts=experts, layouts=layouts, second_run=True)
    return Pipeline((*inserting.passes, *_pruning(outputs), UseEqualized(equalized=equalized)))


def quantizing(
    plan: Plan,
    qparams: Mapping[str, QParamsDict],
    equalized: EqualizedParameters,
    *,
    passes: Sequence[type[Pass] | Pass] = PREPARE,
    kernels: bool = False,
) -> Pipeline:
    """From a traced graph to one that quantizes.

    Observers are inserted here too: they say which slots share a scale.

    :param kernels: whether to multiply integers where that is possible
    """
    inserting = Pipeline.of(passes, plan=plan, equalizes=False)
    qparams = plan.qparams_of_ops(qparams)
    return Pipeline(
        (
            *inserting.passes,
            FoldQParams(qparams=qparams),  # reads from observers what is shared
            UseEqualized(equalized=equalized),  # after folding, which replaces quantized weights
            RemoveObservers(),
            # Last: the other passes look for ops that read a weight.
            *((LowerToKernels(qparams=qparams),) if kernels else ()),
        )
    )


def comparing(
    plan: Plan,
    qparams: Mapping[str, QParamsDict],
    equalized: EqualizedParameters,
    *,
    layouts: Layouts | None = None,
) -> Pipeline:
    """From a traced graph to one that computes the same and compares layers with quantized ones."""
    return Pipeline(
        (
            InlineCalls(),  # first: the other passes see only ops of the graph itself
            Annotate(plan=plan),
            CompareLayers(plan=plan, qparams=plan.qparams_of_ops(qparams)),  # needs the annotations
            LeaveOutPadding(layouts=layouts),  # gives compare nodes the valid tokens
            UseEqualized(equalized=equalized),  # after comparing, which compares what is read
        )
    )


def rerunning(pipeline: Pipeline) -> Pipeline:
    """Return the same for a rerun, which is eager, with products by the faster library."""
    faster = (SpeedUpProducts(),) if onednn_is_faster() else ()
    return Pipeline((*pipeline.passes, *faster))  # last: the other passes look for linear ops


def _pruning(outputs: bool) -> tuple[Pass, ...]:
    """Drop what statistics do not need, last: it leaves no unused ops in the blocks."""
    return () if outputs else (PruneUnobserved(),)
