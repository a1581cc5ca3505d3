"""The pipelines of a calibration: to observe, to quantize, to outline repeats."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from inlay.equalization.parameters import EqualizedParameters
from inlay.graph import Pass, Pipeline
from inlay.observers import QParamsDict
from inlay.padding.layouts import Layouts
from inlay.passes import (
    COMPARE,
    FINALIZE,
    PREPARE,
    FindEqualizable,
    InsertObservers,
    LeaveOutPadding,
    LowerToKernels,
    OutlineRepeats,
    PruneUnobserved,
    UseEqualized,
)
from inlay.recipe import Experts, Plan

__all__ = ["Pipelines", "Purpose"]

# Whether for outputs, whether to compare layers, and whether as the model was
Purpose: TypeAlias = tuple[bool, bool, bool]


@dataclass(frozen=True, kw_only=True)
class Pipelines:
    """Which passes a calibration runs on a graph, in each of its phases.

    :param prepare: passes that make a traced graph observe, as types or as instances
    :param outputs: whether outputs of the model are wanted, and not only statistics
    :param count_padding: whether padding tokens count
    :param compare_layers: whether finalized graphs compare their layers instead of quantizing them
    :param plain: whether graphs are left as they were traced, in every phase
    :param kernels: whether finalized graphs multiply integers where they can, instead of
        quantizing and dequantizing
    """

    plan: Plan
    prepare: Sequence[type[Pass] | Pass] = PREPARE
    outputs: bool = True
    count_padding: bool = False
    compare_layers: bool = False
    plain: bool = False
    kernels: bool = False

    @property
    def purpose(self) -> Purpose:
        """Tell apart the pipelines that a calibration runs on one graph in the same phase."""
        return self.outputs, self.compare_layers, self.plain

    def observing(self, layouts: Layouts | None) -> Pipeline:
        """From a traced graph to one that observes, whole.

        :param layouts: where values have the tokens of a batch with padding; None without padding
        """
        without: list[type[Pass]] = [OutlineRepeats]
        if self.outputs:
            without.append(PruneUnobserved)
        if self.count_padding or layouts is None:
            without.append(LeaveOutPadding)
        return self._without(*without, experts=self.plan.recipe.experts, layouts=layouts)

    def observing_equalized(
        self, layouts: Layouts | None, equalized: EqualizedParameters
    ) -> Pipeline:
        """The same for the second run over the data, through equalized parameters."""
        second = (
            replace(step, second_run=True) if isinstance(step, InsertObservers) else step
            for step in self.observing(layouts).passes
        )
        return Pipeline((*second, UseEqualized(equalized=equalized)))

    def quantizing(
        self,
        qparams: Mapping[str, QParamsDict],
        equalized: EqualizedParameters,
        layouts: Layouts | None = None,
    ) -> Pipeline:
        """From a traced graph to one that quantizes, whole.

        Observers are inserted here too: they say which slots share a scale.
        """
        qparams = self.plan.qparams_of_ops(qparams)
        if self.compare_layers:
            return Pipeline.of(
                COMPARE, plan=self.plan, qparams=qparams, equalized=equalized, layouts=layouts
            )
        left_out = (OutlineRepeats, PruneUnobserved, LeaveOutPadding, FindEqualizable)
        steps = [step for step in FINALIZE if self.kernels or step is not LowerToKernels]
        folding = Pipeline.of(steps, qparams=qparams, equalized=equalized)
        return Pipeline((*self._without(*left_out).passes, *folding.passes))

    def cutting(self) -> Pipeline:
        """Outline the bodies that are compiled on their own, if passes say so."""
        return Pipeline(tuple(p for p in self._all().passes if isinstance(p, OutlineRepeats)))

    def _without(
        self,
        *left_out: type[Pass],
        experts: Experts = "routed",
        layouts: Layouts | None = None,
    ) -> Pipeline:
        passes = self._all(experts=experts, layouts=layouts).passes
        return Pipeline(tuple(p for p in passes if not isinstance(p, left_out)))

    def _all(self, experts: Experts = "routed", layouts: Layouts | None = None) -> Pipeline:
        return Pipeline.of(self.prepare, plan=self.plan, experts=experts, layouts=layouts)
